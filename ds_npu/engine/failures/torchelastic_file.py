"""The last words of torchrun and accelerate: the error of the rank that failed first.

torch 2.13 distributed/elastic/multiprocessing/errors: the agent reads a JSON file of each failed rank, and shows as
root cause the one with the earliest second.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from ds_npu.engine.failures.failure_record import Failure

LATER_SECONDS = 5
"""Seconds by which other failures follow their cause, whose time the agent takes in whole seconds."""


def tell_torchelastic(mine: Failure, line: str, *, is_cause: bool) -> None:
    """Write the file that the agent of this rank reads: ``line``, if there is one, else ``mine``.

    A script whose ``@record`` has written it already keeps it, unless another rank is the cause (not ``is_cause``).
    """
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if not path.name or (is_cause and path.exists()):
        return
    seconds = int(time.time()) + (0 if is_cause else LATER_SECONDS)
    text = line or f"{mine.summary} (at {mine.where}; the traceback stands above, or in the log of rank {mine.rank})"
    message = {"message": mine.summary, "extraInfo": {"py_callstack": text, "timestamp": str(seconds)}}
    with suppress(OSError):
        path.write_text(json.dumps({"message": message}))
