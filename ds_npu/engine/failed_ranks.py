"""After the traceback of an error that is another rank's end, a sentence that says so, last on the screen.

A collective whose peer is gone raises in forward, backward, step or checkpoint, in the words of a transport. What
reaches the top of the main thread passes ``sys.excepthook``, wherever it was raised.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Iterator
from types import TracebackType

from ds_npu.log import logger

# Of gloo (third_party/gloo/gloo/transport/tcp), torch's TCPStore, HCCL and ds_npu sim's HCCL.
PEER_GONE = re.compile(
    r"Connection (?:closed|reset) by peer(?: \[\S+\d)?|Broken pipe|Socket closed|Failed to recv, got 0 bytes"
    r"|rank \d+ \(pid \d+\) has (?:exited|stopped)|remote process exited|HCCL_E_REMOTE"
)
TIMED_OUT = re.compile(
    r"Timed out waiting \d+ms|(?:Socket|Store|Wait) ?[Tt]imeout|HCCL_E_TIMEOUT|EI000[26]\b|wait timeout"
)


def explanation(error: BaseException) -> str | None:
    """What to know of an ``error`` that another rank has caused; None for any other error."""
    rank, ranks = os.environ.get("RANK", "?"), os.environ.get("WORLD_SIZE", "?")
    for each in _chain(error):
        if not isinstance(each, RuntimeError):  # an OSError is a client's own connection
            continue
        if found := PEER_GONE.search(str(each)):
            return (
                f"rank {rank} of {ranks} stopped because another rank ended first ({found[0]}); the traceback "
                "above shows where it waited, not the cause. What to do: find the first error in the logs of the other "
                "ranks; one that was killed says nothing: look for the out-of-memory killer in dmesg, or the scheduler"
            )
        if found := TIMED_OUT.search(str(each)):
            return (
                f"rank {rank} of {ranks} waited for another rank until its time was over ({found[0]}). What to "
                "do: see in the logs of the other ranks which one hangs, has failed or never makes this call; if one "
                "is just slow, raise the timeout (DEEPSPEED_TIMEOUT, on NPUs HCCL_EXEC_TIMEOUT)"
            )
    return None


@functools.cache
def explain_failed_ranks() -> None:
    """Add the explanation to what is printed of an exception that ends this process."""
    shown_by = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        shown_by(kind, error, traceback)
        said = explanation(error)
        if said is None:
            return
        line = f"[ds_npu] ERROR: {said}.\n"
        sys.stderr.write(line)
        sys.stderr.flush()
        if "torch_npu" in sys.modules:
            logger().addHandler(_SaidAgain(line))

    sys.excepthook = show


class _SaidAgain(logging.NullHandler):
    """Writes ``line`` when logging shuts down: after torch_npu's own exit, which warns of the broken communicator."""

    def __init__(self, line: str) -> None:
        super().__init__()
        self.line = line

    def close(self) -> None:
        sys.stderr.write(self.line)
        sys.stderr.flush()
        super().close()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
