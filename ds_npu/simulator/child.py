"""The command of ``ds_npu sim`` as a child whose end is waited for."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def waited_for(program: str, command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run ``command`` and return its exit code, negative for a signal. SIGTERM and SIGHUP are passed on to it."""
    child = subprocess.Popen(
        command,
        executable=program,
        env=environment,
        # The command dies with this process.
        preexec_fn=lambda: ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL),
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda told, _: child.send_signal(told))
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)  # A terminal sends them to the command, too.
    return child.wait()


def ended_as(code: int) -> int:
    """``code``; where a signal has ended the command, the same signal ends this process."""
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code
