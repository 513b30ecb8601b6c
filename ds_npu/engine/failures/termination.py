"""Actions of this process between a SIGTERM and its end, for which launchers give ranks some seconds."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

Action = Callable[[], object]


class Termination:
    """Actions of this process at a SIGTERM, in the order in which they were added.

    A script that has a handler of its own keeps it, and nothing is done here. Python runs handlers in the main thread:
    one that waits in C for another rank gets there when that ends.
    """

    def __init__(self) -> None:
        self._actions: list[Action] = []

    def add(self, action: Action) -> None:
        """Call ``action`` at a SIGTERM; in other threads than the main one nothing is added."""
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._actions:
            if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                return
            signal.signal(signal.SIGTERM, self._end)
        self._actions.append(action)

    def remove(self, action: Action) -> None:
        """Forget ``action``; without any action, SIGTERM has its default effect again."""
        if action not in self._actions or threading.current_thread() is not threading.main_thread():
            return
        self._actions.remove(action)
        if not self._actions and signal.getsignal(signal.SIGTERM) == self._end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _end(self, number: int, frame: object) -> None:
        try:
            for action in [*self._actions]:
                action()
        finally:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


TERMINATION = Termination()
"""The actions of this process."""
