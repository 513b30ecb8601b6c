"""Uses of a rank's memory in one step, at its peak and over time, and a table of them for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # It imports torch, which tables do without.
    from ds_npu.memory.storage_record import StorageRecord

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients of weights, their buckets", "optimizer state"
ACTIVATIONS = "activations of "
"""Prefix of a use; the name of the module whose forward made the activations follows."""
BACKWARD, BETWEEN = "made in backward: other gradients, recomputation", "made in the optimizer step, reductions"
REST = "rest: inside of operators, rounding, tensors of others"
COLUMNS = 400
"""The number of points of a curve."""
MOST_RANKS, MOST_MODULES, LEAST_PART = 8, 10, 0.005
"""Most columns (ranks with the highest peaks), most rows of activations, and the least part of a peak with a row."""
BEFORE, BEHIND = (WEIGHTS, GRADIENTS, OPTIMIZER), (BACKWARD, BETWEEN, REST)
"""Rows before and behind those of activations."""
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
OTHER_ACTIVATIONS = f"{ACTIVATIONS}other modules"

Bytes = dict[str, int]


@dataclass(frozen=True)
class MemoryUse:
    """Uses of one rank's memory in one step, in bytes."""

    rank: int
    at_peak: Bytes
    reserved: int | None
    """The most that the device's allocator had from the device, unused parts included; None on the CPU."""
    outside: int | None
    """Device memory outside of the allocator at the end of the step: buffers of HCCL, the runtime."""
    curve: list[tuple[int, Bytes]]
    """Points: the number of storages made or freed before, and the bytes held; of neighbours the highest."""

    @property
    def peak(self) -> int:
        """Bytes that the allocator counted, or on the CPU bytes of tensors."""
        return sum(self.at_peak.values())


def memory_use(rank: int, record: StorageRecord, reserved: int | None, outside: int | None) -> MemoryUse:
    """Sum up ``record`` by use."""
    states = list(_states(record))
    if record.samples:
        most = record.samples[-1].peak
        sample = next(each for each in record.samples if each.peak == most)
        at_peak = _held(record, sample.changes)
        # The peak may have been within an operator, or in code that is not recorded.
        at_peak[REST] = most - at_peak.total()
    else:
        _, highest = max(states, key=lambda state: sum(state[1].values()))
        at_peak = Counter(highest)
    return MemoryUse(rank, dict(at_peak), reserved, outside, _thinned(states))


def _held(record: StorageRecord, changes: int) -> Counter[str]:
    held: Counter[str] = Counter()
    for change in record.changes[:changes]:
        held[record.uses[change.storage]] += change.size
    return +held


def _states(record: StorageRecord) -> Iterator[tuple[int, Bytes]]:
    """Yield every local maximum of the bytes held: the number of changes before it, and bytes by use."""
    held: Counter[str] = Counter()
    samples = {each.changes: each.allocated for each in record.samples}
    rose = False
    for count, change in enumerate(record.changes):
        if change.size < 0 and rose:
            yield count, +held
        rose = change.size > 0
        held[record.uses[change.storage]] += change.size
        if count + 1 in samples:
            held[REST] = 0
            held[REST] = max(0, samples[count + 1] - held.total())
    yield len(record.changes), +held


def _thinned(states: list[tuple[int, Bytes]]) -> list[tuple[int, Bytes]]:
    """The highest state of each column of neighbouring ``states``."""
    width = max(1, -(-states[-1][0] // COLUMNS))
    columns: dict[int, tuple[int, Bytes]] = {}
    for count, held in states:
        column = count // width
        if column not in columns or sum(held.values()) > sum(columns[column][1].values()):
            columns[column] = count, held
    return [columns[column] for column in sorted(columns)]


def use_table(step: int, uses: Sequence[MemoryUse]) -> str:
    """A row for each use of memory, a column for each rank."""
    most = max(each.peak for each in uses)
    size, unit = next((each for each in UNITS if most >= 10 * each[0]), UNITS[-1])
    shown = sorted(sorted(uses, key=lambda each: -each.peak)[:MOST_RANKS], key=lambda each: each.rank)
    rows = [(f"memory at the peak of step {step}, in {unit}", [f"rank {each.rank}" for each in shown])]
    rows += [(name, [_number(value, size) for value in values]) for name, values in _rows(shown)]
    first = max(len(name) for name, _ in rows)
    width = max(9, *(len(cell) for _, cells in rows for cell in cells))
    lines = [f"{name:<{first}}" + "".join(f"  {cell:>{width}}" for cell in cells) for name, cells in rows]
    if len(uses) > len(shown):
        least = min(uses, key=lambda each: each.peak)
        lines.append(
            f"the {len(shown)} of {len(uses)} ranks with the highest peaks; the lowest: rank {least.rank}, "
            f"{_number(least.peak, size)}"
        )
    return "\n".join(lines)


def largest_activations(uses: Sequence[MemoryUse], most: int) -> list[str]:
    """The ``most`` largest activations at the peak of any of ``uses``, the largest first."""
    largest: dict[str, float] = {}
    for use in uses:
        for name, size in use.at_peak.items():
            if name.startswith(ACTIVATIONS) and size >= LEAST_PART * use.peak:
                largest[name] = max(size, largest.get(name, 0))
    return sorted(largest, key=lambda name: -largest[name])[:most]


def _rows(uses: Sequence[MemoryUse]) -> Iterator[tuple[str, list[int | None]]]:
    names = [*BEFORE, *largest_activations(uses, MOST_MODULES)]
    others = [each.peak - sum(each.at_peak.get(name, 0) for name in (*names, *BEHIND)) for each in uses]
    for name in names:
        yield name, [each.at_peak.get(name, 0) for each in uses]
    yield OTHER_ACTIVATIONS, list(others)
    for name in BEHIND:
        if any(name in each.at_peak for each in uses):
            yield name, [each.at_peak.get(name, 0) for each in uses]
    yield "= tensors", [each.peak for each in uses]
    if any(each.reserved is not None for each in uses):
        unused = [None if each.reserved is None else each.reserved - each.peak for each in uses]
        yield "fragments and spare memory of the allocator", unused
        yield "outside of the allocator: HCCL's buffers, the runtime", [each.outside for each in uses]


def _number(value: int | None, size: int) -> str:
    return "-" if value is None else f"{value / size:,.1f}"
