"""Messages of a rank that an error ends: one rank prints the error whole, the others one line that points to it.

What reaches the top of the main thread passes ``sys.excepthook``. There the rank tells the others, over the store of
the default process group, which error ended it, and learns whether it is

* the error that rank 0 has, too (a refusal on all ranks, Ctrl-C): rank 0 says it;
* the end of another rank, in the words of a transport, since a collective whose peer is gone raises wherever it is
  called: the traceback of the transport is left out where the error of that rank is known;
* its own.

Nobody waits longer than ``PATIENCE_SECONDS`` for another rank. Without the section, and on one rank, Python's own hook
is all there is.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ds_npu.config.problems import ConfigError, printable
from ds_npu.engine.failures.failure_record import PATIENCE_SECONDS, Failure, FailureRecord, rank_numbers
from ds_npu.log import logger

# Of gloo (third_party/gloo/gloo/transport/tcp), torch's TCPStore, HCCL and ds_npu sim's HCCL.
ENDED_FIRST = "another rank has ended its process"
"""The text for a peer's end where this rank waited at the store, and not in a transport."""
PEER_GONE = re.compile(
    r"Connection (?:closed|reset) by peer(?: \[\S+\d)?|Broken pipe|Socket closed|Failed to recv, got 0 bytes"
    r"|rank \d+ \(pid \d+\) has (?:exited|stopped)|remote process exited|HCCL_E_REMOTE"
    rf"|{ENDED_FIRST}"
)
TIMED_OUT = re.compile(
    r"Timed out waiting \d+ms|(?:Socket|Store|Wait) ?[Tt]imeout|HCCL_E_TIMEOUT|EI000[26]\b|wait timeout"
)
LIBRARIES = ("site-packages", "dist-packages", "<frozen", str(Path(__file__).parents[2]), os.path.dirname(os.__file__))
"""Parts of paths of files that are not the user's script."""
MOST_OF_A_SUMMARY = 1000
"""Most characters of an error that another rank repeats; a PipelineError names its cause in its middle."""
LATER_SECONDS = 5
"""Seconds added to the time of a failure that another rank has caused; the agent compares whole seconds."""


@dataclass(frozen=True)
class Ending:
    """How a rank ends."""

    is_whole: bool
    """Whether it prints the traceback."""
    line: str = ""
    """The line that it prints after the traceback; empty: none."""
    is_cause: bool = True
    """Whether no other rank is known to have ended it."""


class Hook:
    """The outermost ``sys.excepthook``: torch's own prints nothing until the hook below it has ended."""

    def __init__(self) -> None:
        self.below = self.first_below = sys.excepthook
        self.is_showing = False

    def install(self) -> None:
        if sys.excepthook is not self:
            self.below = sys.excepthook
            sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if self.is_showing:  # Called by a hook that was put above this one, and is now below it.
            self.first_below(kind, error, traceback)
            return
        self.is_showing = True
        record = FailureRecord.of_this_world()
        try:
            ending = ending_of(error, traceback, record)
        except KeyboardInterrupt:
            ending = Ending(is_whole=True)
        if ending.is_whole:
            self.below(kind, error, traceback)
        tell_torchelastic(failure_of(error, traceback), ending.line, is_cause=ending.is_cause)
        if ending.line:
            line = f"[ds_npu] ERROR: {ending.line}.\n"
            sys.stderr.write(line)
            if sys.modules.get("torch_npu") is not None:
                logger().addHandler(_RepeatedLine(line))
        sys.stderr.flush()
        if record is not None:
            # torch_npu's watchdog soon aborts a process whose collective has failed, and would have the last word.
            is_watched = sys.modules.get("torch_npu") is not None and _match(PEER_GONE, error) is not None
            record.leave(after_rank_0=not ending.is_whole, waits=not is_watched)
        elif not ending.is_whole:
            time.sleep(PATIENCE_SECONDS)  # Launchers end all ranks with the first one.


@functools.cache
def _hook() -> Hook:
    if not faulthandler.is_enabled():
        faulthandler.enable()  # A rank that ends by SIGSEGV, SIGABRT or SIGBUS says where.
    return Hook()


def explain_failed_ranks() -> None:
    """Make an exception that ends this process print what a reader of all ranks' output needs."""
    _hook().install()


def tell_torchelastic(mine: Failure, line: str, *, is_cause: bool) -> None:
    """Write the file that the agent of this rank reads: ``line``, if there is one, else ``mine``.

    A script whose ``@record`` has written it already keeps it, unless another rank is the cause (not ``is_cause``).
    The agent of torchrun and accelerate shows as root cause the failure with the earliest second (torch 2.13
    distributed/elastic/multiprocessing/errors).
    """
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if not path.name or (is_cause and path.exists()):
        return
    seconds = int(time.time()) + (0 if is_cause else LATER_SECONDS)
    text = line or f"{mine.summary} (at {mine.where}; the traceback stands above, or in the log of rank {mine.rank})"
    message = {"message": mine.summary, "extraInfo": {"py_callstack": text, "timestamp": str(seconds)}}
    with suppress(OSError):
        path.write_text(json.dumps({"message": message}))


def ending_of(error: BaseException, traceback: TracebackType | None, record: FailureRecord | None) -> Ending:
    """How this rank ends by ``error``, after an exchange with the others over the store."""
    rank, ranks, local_rank = rank_numbers()
    me = f"rank {rank} of {ranks}"
    mine = failure_of(error, traceback)
    if ranks == 1:
        return Ending(is_whole=True)
    if record is None:
        if isinstance(error, ConfigError) and local_rank > 0:
            # Ranks of a node read the same file. The line has the whole error: a launcher may end the first rank now.
            whole = " ".join(f"{error}".split())
            return Ending(False, f"{me} ended with the error that the first rank of this node says: {whole}")
        return Ending(is_whole=True, line=_explained(error, me) or "")
    found = _match(PEER_GONE, error)
    return _after(found, mine, record) if found else _own(error, mine, record)


def _own(error: BaseException, mine: Failure, record: FailureRecord) -> Ending:
    """End by an error that others may have, too, and that no other rank is known to have caused."""
    me = f"rank {mine.rank} of {record.ranks}"
    first = record.note(mine)
    speaker = record.speaker_of(mine)
    if speaker != mine.rank:
        return Ending(
            False, f"{me} ended with the same error as rank {speaker}, which says it: {mine.summary}", is_cause=False
        )
    before = f"{me} failed after {first.told()}" if first is not None and first.kind != mine.kind else ""
    return Ending(True, "; ".join(filter(None, (_explained(error, me), before))))


def _after(found: str, mine: Failure, record: FailureRecord) -> Ending:
    """End because the connection to another rank is gone, as ``found`` says."""
    me = f"rank {mine.rank} of {record.ranks}"
    if not record.answers():
        return Ending(
            False,
            f"{me} ended because rank 0 ended first ({found}), where {me} waited at {mine.where}. What to do: find the "
            "error of rank 0 above or in its log; if there is none it was killed: look for the out-of-memory killer in "
            "dmesg, or the scheduler",
            is_cause=False,
        )
    first = record.first()
    if first is not None:
        return Ending(False, f"{me} ended because of {first.told()}", is_cause=False)
    speaker = record.witness()
    if speaker == mine.rank:
        return Ending(True, _gone(me, found), is_cause=False)
    line = f"{me} ended, as rank {speaker} says of itself, because another rank ended first ({found})"
    return Ending(False, line, is_cause=False)


def _explained(error: BaseException, me: str) -> str | None:
    """Explain an ``error`` that another rank may have caused; None for any other error."""
    if found := _match(PEER_GONE, error):
        return _gone(me, found)
    if found := _match(TIMED_OUT, error):
        return (
            f"{me} waited for another rank until its time was over ({found}). What to do: see in the logs of the other "
            "ranks which one hangs, has failed or never makes this call; if one is just slow, raise the timeout "
            "(DEEPSPEED_TIMEOUT, on NPUs HCCL_EXEC_TIMEOUT)"
        )
    return None


def _gone(me: str, found: str) -> str:
    return (
        f"{me} stopped because another rank ended first ({found}); the traceback above shows where it waited, not the "
        "cause. What to do: find the first error in the logs of the other ranks; one that was killed says nothing: "
        "look for the out-of-memory killer in dmesg, or the scheduler"
    )


def _match(pattern: re.Pattern[str], error: BaseException) -> str | None:
    """The words of ``pattern`` in ``error`` or its causes."""
    for each in _chain(error):
        # An OSError comes from a connection of the client's own.
        if isinstance(each, RuntimeError) and (found := pattern.search(str(each))):
            return found[0]
    return None


def is_of_transport(error: BaseException) -> bool:
    """Whether ``error`` says that another rank is gone, or did not answer in time."""
    return (_match(PEER_GONE, error) or _match(TIMED_OUT, error)) is not None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def failure_of(error: BaseException, traceback: TracebackType | None) -> Failure:
    """``error`` in words; errors of one kind are raised at the same line of the program."""
    rank, _, _ = rank_numbers()
    name = type(error).__name__
    lines = str(error).strip().splitlines()
    frames = _frames(traceback)
    scripts = [frame for frame, is_script in frames if is_script] or [frame for frame, _ in frames] or ["?"]
    innermost = frames[-1][0] if frames else ""
    kind = name if isinstance(error, KeyboardInterrupt) else f"{name} at {innermost}"
    summary = printable(": ".join([name, *lines[:1]]), MOST_OF_A_SUMMARY) + (" ..." if len(lines) > 1 else "")
    return Failure(rank, os.uname().nodename, kind, summary, scripts[-1])


def _frames(traceback: TracebackType | None) -> list[tuple[str, bool]]:
    """File, line and function of each frame, outermost first, and whether it is of the user's script."""
    found = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        found.append((f"{code.co_filename}:{traceback.tb_lineno} in {code.co_name}", is_of_script(code.co_filename)))
        traceback = traceback.tb_next
    return found


def is_of_script(file: str) -> bool:
    """Whether ``file`` is the user's, and of no library."""
    return not any(part in file for part in LIBRARIES)


class _RepeatedLine(logging.NullHandler):
    """Writes ``line`` when logging shuts down: after torch_npu's own exit, which warns of the broken communicator."""

    def __init__(self, line: str) -> None:
        super().__init__()
        self.line = line

    def close(self) -> None:
        sys.stderr.write(self.line)
        sys.stderr.flush()
        super().close()
