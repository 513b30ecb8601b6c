"""Calls that every rank must make together: the error where some of the ranks do not.

A script with ``if rank == 0: engine.save_checkpoint(...)`` makes collectives that the others do not join: rank 0 would
wait until the timeout, or its collective would meet one of another call. So ranks meet at the start of such a call,
over the store of the default process group. The wait ends with one error on every rank that is in the call: when
another one has ended its script or makes another such call, and at last when the process group's timeout is over. For a
rank that tells nothing of itself nobody waits here: it may be dead.
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch._C._distributed_c10d import Store

from ds_npu.engine.failures.failed_ranks import is_of_script
from ds_npu.engine.failures.failure_record import FailureRecord
from ds_npu.stacks import main_stack

P = ParamSpec("P")
T = TypeVar("T")

WARN_AFTER_SECONDS = 60.0
"""How long a rank waits before it says for whom; the others may have good reasons to be slower."""
SILENT_SECONDS = 15.0
"""After so long a rank that says nothing of itself may be dead, which the call's own collectives find out at once."""
LONGEST_PAUSE_SECONDS = 1.0
SHOWN = 4
ALL = "all"
THE_END = "the end of its script"
REMEDY = (
    "Every rank must make this call, since each holds a part; a file is written once all the same. What to do: call it "
    "outside of a condition on the rank (if rank == 0, is_main_process)"
)


class JointCalls:
    """The joint calls of one rank, counted: the n-th of each rank has to be the n-th of all others.

    ``record`` None: a world of one rank, which waits for nobody.
    """

    def __init__(self, record: FailureRecord | None) -> None:
        self.record = record
        self.number = 0
        """Number of the last call that this rank has made, or is in."""
        self.depth = 0
        self.speaking = threading.Lock()
        self.has_ended = False
        if record is not None:
            self.number = record.store.add(_count(record.rank), 0)
            atexit.register(self._end, record)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Begin the block when all ranks are in ``name``; raise RuntimeError if one cannot come.

        A call within another one is a part of it.
        """
        self.depth += 1
        try:
            if self.record is not None and self.depth == 1:
                # Work that waits for a dead rank raises here, and not in a thread that ends this process.
                get_accelerator().synchronize()
                self.number = self.record.store.add(_count(self.record.rank), 1)
                _meet(self.record, name, self.number)
            yield
        finally:
            self.depth -= 1

    def say_where(self) -> None:
        """Tell ranks that wait for this one in a call at which line of its script it is.

        Another thread calls it, once this rank has stood still for a while.
        """
        if self.record is not None and self.depth == 0:
            with self.speaking:
                self._say_where(self.record, self.number + 1)

    def _say_where(self, record: FailureRecord, number: int) -> None:
        if self.has_ended:
            return

        def tell() -> None:
            if record.store.check([f"joint call {number}"]):
                record.store.set(_position_key(number, record.rank), _line_of_script())

        record.ask(tell, None)

    def _end(self, record: FailureRecord) -> None:
        """Tell the other ranks, at the end of this process, that it makes no further call."""
        number = self.number + 1
        # Python then ends threads that are in C++ by unwinding, which aborts the process: none may be in the store.
        with self.speaking:
            self.has_ended = True

        def tell() -> None:
            record.store.set(_position_key(number, record.rank), THE_END)
            _settle(record, number, f"rank {record.rank} has ended")

        record.ask(tell, None)


def joint_calls_of_this_world() -> JointCalls:
    """The joint calls of the default process group, the same for all engines of this process."""
    record = FailureRecord.of_this_world()
    return JointCalls(None) if record is None else _of(dist.distributed_c10d._get_default_store())


@functools.lru_cache(maxsize=1)
def _of(store: Store) -> JointCalls:
    return JointCalls(FailureRecord.of_this_world())


class HasJointCalls(Protocol):
    """An engine that makes joint calls."""

    joint_calls: JointCalls


E = TypeVar("E", bound=HasJointCalls)


def joint(name: str) -> Callable[[Callable[Concatenate[E, P], T]], Callable[Concatenate[E, P], T]]:
    """Make a method of an engine a joint call, ``name``."""

    def made(method: Callable[Concatenate[E, P], T]) -> Callable[Concatenate[E, P], T]:
        @functools.wraps(method)
        def joint_method(engine: E, /, *args: P.args, **kwargs: P.kwargs) -> T:
            with engine.joint_calls.call(name):
                return method(engine, *args, **kwargs)

        return joint_method

    return made


def _meet(record: FailureRecord, name: str, number: int) -> None:
    """Wait until all ranks are in call ``number``, or one is silent; raise RuntimeError where they do not meet."""
    store = record.store
    store.set(_position_key(number, record.rank), name)
    others = store.compare_set(f"joint call {number}", "", name).decode()
    if others != name:
        _settle(record, number, f"rank {record.rank} calls {name}, where {others} was called first")
    elif store.add(f"ranks in joint call {number}", 1) == record.ranks:
        _settle(record, number, ALL)
    timeout_s = record.timeout_s
    begun = time.monotonic()
    pause = 0.001
    has_warned = False
    while not store.check([_outcome(number)]):
        waited = time.monotonic() - begun
        if waited > timeout_s:
            _settle(record, number, f"after {waited:.0f} s, the timeout of the process group")
        elif waited > SILENT_SECONDS and "" in _positions(record, number):
            return
        elif waited > WARN_AFTER_SECONDS and not has_warned:
            has_warned = True
            if record.rank == _positions(record, number).index(name):
                standing = _standing(record, name, number)
                sys.stderr.write(f"[ds_npu] WARNING: {name} waits, after {waited:.0f} s: {standing}. {REMEDY}.\n")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    outcome = store.get(_outcome(number)).decode()
    if outcome != ALL:
        raise RuntimeError(f"{name} ends, {outcome}: {_standing(record, name, number)}. {REMEDY}")


def _settle(record: FailureRecord, number: int, outcome: str) -> None:
    """Set the outcome of a call, ALL or why it ends, unless another rank has set it."""
    record.store.compare_set(_outcome(number), "", outcome)


def _standing(record: FailureRecord, name: str, number: int) -> str:
    """Describe which ranks are in the call, and where the others stand."""
    positions = _positions(record, number)
    inside = [rank for rank, position in enumerate(positions) if position == name]
    outside = [rank for rank, position in enumerate(positions) if position != name]
    where = [f"rank {rank} is at {positions[rank] or 'a place that it does not say'}" for rank in outside[:SHOWN]]
    more = f", and {len(outside) - SHOWN} more" if len(outside) > SHOWN else ""
    return f"in it {_ranks(inside)} of {record.ranks}; {'; '.join(where)}{more}"


def _positions(record: FailureRecord, number: int) -> list[str]:
    """The call that each rank is in, or the line of its script; empty where it says nothing."""
    keys = [_position_key(number, rank) for rank in range(record.ranks)]
    return [record.store.get(key).decode() if record.store.check([key]) else "" for key in keys]


def _ranks(found: list[int]) -> str:
    shown = ", ".join(map(str, found[:SHOWN]))
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"{'is rank' if len(found) == 1 else 'are ranks'} {shown}{more}"


def _line_of_script() -> str:
    """Where the main thread is: the innermost line that is of no library."""
    stack = main_stack()
    scripts = [each for each in stack if is_of_script(each.filename)]
    if not stack:
        return "the end of its main thread"
    innermost = (scripts or stack)[-1]
    return f"{innermost.filename}:{innermost.lineno} in {innermost.name}: {innermost.line}"


def _count(rank: int) -> str:
    return f"joint calls of rank {rank}"


def _position_key(number: int, rank: int) -> str:
    return f"place of rank {rank} at joint call {number}"


def _outcome(number: int) -> str:
    return f"outcome of joint call {number}"
