"""What the memory of a rank was used for in one step: at its peak, and over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ds_npu.memory.storage_record import StorageRecord

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients of weights, their buckets", "optimizer state"
ACTIVATIONS = "activations of "
"""Before the name of the module whose forward made them."""
BACKWARD, BETWEEN = "made in backward: other gradients, recomputation", "made in the optimizer step, reductions"
REST = "rest: inside of operators, rounding, tensors of others"
COLUMNS = 400
"""Points of a curve."""

Bytes = dict[str, int]
"""By what they are used for."""


@dataclass(frozen=True)
class MemoryUse:
    """Of one rank in one step, in bytes."""

    rank: int
    at_peak: Bytes
    """When most was held."""
    reserved: int | None
    """The most that the device's allocator had from the device, unused parts included; None on the CPU."""
    outside: int | None
    """What the device has given to others than the allocator, at the end: buffers of HCCL, the runtime."""
    curve: list[tuple[int, Bytes]]
    """By the number of storages that the step had made or freed until then, what was held; of neighbours the most."""

    @property
    def peak(self) -> int:
        """As the allocator has counted, or on the CPU what tensors held."""
        return sum(self.at_peak.values())


def memory_use(rank: int, record: StorageRecord, reserved: int | None, outside: int | None) -> MemoryUse:
    """What ``record`` comes to."""
    states = list(_states(record))
    if record.samples:
        most = record.samples[-1].peak
        sample = next(each for each in record.samples if each.peak == most)
        at_peak = _held(record, sample.changes)
        # The peak may have been within an operator, or of code that is not recorded.
        at_peak[REST] = most - at_peak.total()
    else:
        _, highest = max(states, key=lambda state: sum(state[1].values()))
        at_peak = Counter(highest)
    return MemoryUse(rank, dict(at_peak), reserved, outside, _thinned(states))


def _held(record: StorageRecord, changes: int) -> Counter[str]:
    """Bytes by use after so many changes."""
    held: Counter[str] = Counter()
    for change in record.changes[:changes]:
        held[record.uses[change.storage]] += change.size
    return +held


def _states(record: StorageRecord) -> Iterator[tuple[int, Bytes]]:
    """Whenever most was held for a moment: after how many changes, and what."""
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
    """Of neighbouring states that in which most was held."""
    width = max(1, -(-states[-1][0] // COLUMNS))
    columns: dict[int, tuple[int, Bytes]] = {}
    for count, held in states:
        column = count // width
        if column not in columns or sum(held.values()) > sum(columns[column][1].values()):
            columns[column] = count, held
    return [columns[column] for column in sorted(columns)]
