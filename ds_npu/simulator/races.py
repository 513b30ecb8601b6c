"""Finds races in a recorded run: two touches of the same bytes of an NPU, one of them a write, that nothing orders.

Three things order the tasks of a process. A stream runs its tasks one after the other. A stream that waits for an event
goes on after all tasks that the recording stream was given before the record. And a task comes after the events that
the host had waited for, or had found reached, before it put the task on its stream. Vector clocks (Mattern 1989) count,
for each stream, up to which of its tasks that is known. A collective ends on all its ranks at the same time, so other
processes need not be looked at. Bytes of tensors are sets with strides, not ranges.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_npu.simulator.replay.recording import RecordedAction, RecordedRun

READ = 0
"""The access of a touch that only reads, as the trace has it."""
MOST_PIECES = 1 << 22
"""Most pieces of a tensor's memory that are compared; a tensor with more counts as one whole range."""
HOST = (-1, 0)
"""The stream of what the host does itself."""

StreamKey = tuple[int, int]
Clock = dict[StreamKey, int]


class Bytes(NamedTuple):
    """The bytes of a tensor on a device: ``first`` to ``last`` (excluded), and its sizes and strides in bytes."""

    first: int
    last: int
    item: int
    dims: tuple[tuple[int, int], ...]
    """Size and stride of each dim, the largest stride first."""

    @property
    def is_dense(self) -> bool:
        """Whether it is a single piece."""
        return self.last - self.first == self.piece()[0]

    def piece(self) -> tuple[int, list[tuple[int, int]]]:
        """The bytes in a piece without a gap, and the dims that repeat the piece."""
        length, dims = self.item, list(self.dims)
        while dims and dims[-1][1] == length:
            length *= dims.pop()[0]
        return length, dims


@dataclass(frozen=True, eq=False)
class Touched:
    """A touch by the ``number``-th task of ``stream``."""

    action: RecordedAction
    bytes: Bytes
    writes: bool
    stream: StreamKey
    number: int


@dataclass(frozen=True)
class Race:
    """Two touches that nothing orders, in the order in which the host put them on their streams."""

    first: Touched
    second: Touched

    def __str__(self) -> str:
        one, other = self.first, self.second
        size = min(one.bytes.last, other.bytes.last) - max(one.bytes.first, other.bytes.first)
        return (
            f"{_named(other)} {_does(other)} bytes that {_named(one)} {_does(one)}, and nothing orders them: up to "
            f"{size:,} bytes at {max(one.bytes.first, other.bytes.first):#x} of NPU {one.action.device}, process "
            f"{one.action.process}\n  {_caller(one)}\n  {_caller(other)}"
        )


def races(recording: RecordedRun) -> Iterator[Race]:
    """The races of each process, one for each pair of callers in the program (Python stacks and operators)."""
    for actions in recording.processes.values():
        seen: set[tuple[str, ...]] = set()
        for race in _races(actions):
            callers = tuple(f"{each.action.name} {each.action.told.get('stack')}" for each in (race.first, race.second))
            if callers not in seen:
                seen.add(callers)
                yield race


def _races(actions: Iterable[RecordedAction]) -> Iterator[Race]:
    host: Clock = {}
    clocks: dict[StreamKey, Clock] = defaultdict(dict)
    numbers: dict[StreamKey, int] = defaultdict(int)
    events: dict[int, Clock] = {}
    memory = Memory()
    for action in actions:
        if action.of_host:
            if action.event is not None:
                _join(host, events.get(action.event, {}))
                continue
            key, clock = HOST, host
        else:
            key = (action.device, action.stream)
            clock = clocks[key]
            _join(clock, host)
        if action.records:
            assert action.event is not None
            events[action.event] = dict(clock)
        elif action.event is not None:
            _join(clock, events.get(action.event, {}))
        else:
            numbers[key] += 1
            clock[key] = numbers[key]
            for access, *told in action.told.get("touches", ()):
                touch = Touched(action, _bytes(*told), access != READ, key, numbers[key])
                yield from memory.touched(touch, clock)


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if number > clock.get(stream, 0):
            clock[stream] = number


def _bytes(address: int, item: int, sizes: Sequence[int], strides: Sequence[int]) -> Bytes:
    dims = sorted(((size, stride * item) for size, stride in zip(sizes, strides, strict=True)), key=lambda it: -it[1])
    return Bytes(address, address + sum((size - 1) * stride for size, stride in dims) + item, item, tuple(dims))


class Memory:
    """The touches that a later one may race with, by parts of memory: all bytes of a part have the same touches."""

    def __init__(self) -> None:
        self._begins: list[int] = [0]
        """The first byte of each part, sorted."""
        self._touches: list[list[Touched]] = [[]]

    def touched(self, touch: Touched, clock: Clock) -> Iterator[Race]:
        """Yield the races of ``touch`` with earlier touches.

        Then keep it, and drop the touches that it supersedes.
        """
        first = self._border(touch.bytes.first)
        end = self._border(touch.bytes.last)
        compared: set[int] = set()
        for part in range(first, end):
            kept: list[Touched] = []
            for old in self._touches[part]:
                is_ordered = clock.get(old.stream, 0) >= old.number
                if not is_ordered and (old.writes or touch.writes) and id(old) not in compared:
                    compared.add(id(old))
                    if overlap(old.bytes, touch.bytes):
                        yield Race(old, touch)
                # Whoever comes after the new touch comes after the old one, too.
                if not (is_ordered and touch.bytes.is_dense and (touch.writes or not old.writes)):
                    kept.append(old)
            self._touches[part] = [*kept, touch]
        if all(len(self._touches[part]) == 1 for part in range(first, end)):
            self._begins[first:end] = [touch.bytes.first]
            self._touches[first:end] = [[touch]]

    def _border(self, address: int) -> int:
        """The number of the part that begins at ``address``; where none does, the part around it is split."""
        part = bisect.bisect_right(self._begins, address) - 1
        if self._begins[part] == address:
            return part
        self._begins.insert(part + 1, address)
        self._touches.insert(part + 1, [*self._touches[part]])
        return part + 1


def overlap(one: Bytes, other: Bytes) -> bool:
    """Whether two tensors share a byte."""
    if one.is_dense and other.is_dense:
        return one.first < other.last and other.first < one.last
    begins, length = _pieces(one)
    others, other_length = _pieces(other)
    # Of the pieces that begin before the end of one of the others, the last one may reach into it.
    before = np.searchsorted(begins, others + other_length, side="left") - 1
    return bool(np.any((before >= 0) & (begins[before] + length > others)))


def _pieces(one: Bytes) -> tuple[np.ndarray, int]:
    """The sorted addresses at which pieces of memory without a gap begin, and their length."""
    length, dims = one.piece()
    if int(np.prod([size for size, _ in dims], dtype=np.int64)) > MOST_PIECES:
        return np.array([one.first]), one.last - one.first
    begins = np.array([one.first], dtype=np.int64)
    for size, stride in dims:
        begins = (begins[:, None] + stride * np.arange(size, dtype=np.int64)).ravel()
    return np.unique(begins), length


def _named(touch: Touched) -> str:
    return f"{touch.action.name} (task {touch.action.number}, {_stream(touch)})"


def _stream(touch: Touched) -> str:
    return "the host" if touch.stream == HOST else f"stream {touch.action.stream}"


def _does(touch: Touched) -> str:
    return "writes" if touch.writes else "reads"


def _caller(touch: Touched) -> str:
    stack = str(touch.action.told.get("stack") or "from outside of Python (autograd's thread, or a library)")
    return f"{touch.action.name}: {stack}"


def race_report(found: Iterable[Race], most: int) -> Iterator[str]:
    """Lines about the first ``most`` races, and what to do."""
    shown = list(itertools.islice(found, most + 1))
    for race in shown[:most]:
        yield f"race: {race}"
    if len(shown) > most:
        yield f"and further ones: only {most} are shown"
    if shown:
        yield (
            "What to do: let the stream of the second wait for the first (stream.wait_stream), and tell the allocator "
            "of a tensor that another stream uses (tensor.record_stream)"
        )
