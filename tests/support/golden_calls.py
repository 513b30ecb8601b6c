"""Counts of the Python calls of a block, as a figure of how many pieces a step goes through."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import ds_npu

PACKAGE = str(Path(ds_npu.__file__).parent)


class Calls:
    """The calls while it is entered, of this thread and of threads of Python that begin meanwhile.

    Threads of a backward on a device are torch's, and are not counted.
    """

    def __init__(self) -> None:
        self.own = self.total = 0
        """Calls of functions of ds_npu, and of all functions that are written in Python."""
        self._is_own: dict[CodeType, bool] = {}

    def __enter__(self) -> Calls:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        is_own = self._is_own.get(code)
        if is_own is None:
            is_own = self._is_own[code] = code.co_filename.startswith(PACKAGE)
        self.total += 1
        self.own += is_own
