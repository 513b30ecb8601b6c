"""The stacks of this process's threads, read without keeping their local variables alive."""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType


def stacks() -> dict[int, traceback.StackSummary]:
    """The stack of each Python thread by its identifier, the outermost call first.

    A referenced frame keeps the local variables of its function, tensors among them, after the function has returned.
    So this function reads no source file, which takes long where files are not cached, while it has frames: a summary
    reads its lines later, when they are printed.
    """
    frames = sys._current_frames()
    # The caller is the innermost call of its own thread.
    frames[threading.get_ident()] = sys._getframe(1)
    return {thread: _summary(frames.pop(thread)) for thread in list(frames)}


def main_stack() -> traceback.StackSummary:
    """The stack of the main thread; empty where that has ended."""
    return stacks().get(threading.main_thread().ident or 0, traceback.StackSummary())


def _summary(frame: FrameType | None) -> traceback.StackSummary:
    found = []
    while frame is not None:
        code = frame.f_code
        found.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name, lookup_line=False))
        frame = frame.f_back
    return traceback.StackSummary.from_list(found[::-1])
