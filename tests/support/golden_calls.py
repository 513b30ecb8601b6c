"""Counts of the Python calls of a block, as a figure of how many pieces a step goes through."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType, TracebackType

from golden_internals import BACKWARD_THREADS

import ds_npu

PACKAGE = Path(ds_npu.__file__).parent
SITE = "site-packages/"


class Calls:
    """The calls while it is entered, of this thread and of ds_npu's threads for backwards that begin meanwhile.

    Not counted are torch's threads for backwards on a device, and the threads that look after failed and silent ranks:
    how often these look depends on time.
    """

    def __init__(self) -> None:
        self._of: Counter[CodeType] = Counter()

    def __enter__(self) -> Calls:
        threading.setprofile(self._begin)
        sys.setprofile(self._see)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _begin(self, frame: FrameType, event: str, argument: object) -> None:
        """See the calls of the thread that begins, if it is one for backwards."""
        is_counted = threading.current_thread().name.startswith(BACKWARD_THREADS)
        sys.setprofile(self._see if is_counted else None)
        if is_counted:
            self._see(frame, event, argument)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self._of[frame.f_code] += 1

    def counts(self) -> dict[str, object]:
        """How often functions of ds_npu were called, and all; and those of each file of ds_npu or other package."""
        found: Counter[str] = Counter()
        for code, count in self._of.items():
            found[_source(code.co_filename)] += count
        own = sum(count for source, count in found.items() if source.endswith(".py"))
        return {"ds_npu": own, "total": sum(found.values()), "sources": dict(sorted(found.items()))}


def _source(path: str) -> str:
    """The path of a file of ds_npu within it, or the package of another file."""
    if path.startswith(f"{PACKAGE}/"):
        return path.removeprefix(f"{PACKAGE}/")
    return path.partition(SITE)[2].partition("/")[0].removesuffix(".py") or "Python"
