"""The parts of a stage's weights that each rank holds, by their placements and the rules of DeepSpeed's partitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ds_npu.parallel.runtime.placement import Placement
from ds_npu.parallel.whole_matrices.pieces import Ranges, WeightHolding, dims_of
from ds_npu.topology.degrees import Axis, Degrees


class MatrixWeight(NamedTuple):
    """A weight that Muon steps."""

    placement: Placement
    matrix_rows: int = 0
    """Rows of each matrix; 0: all."""


Run = tuple[int, int, int, int]
Partition = Callable[[Sequence[tuple[int, int]], int, int, int], Iterable[Run]]
"""A function that yields the runs in a rank's partition of a flat buffer of weights, under ZeRO 1 and 2.

A run is (the weight's index, first element in the weight, start in the partition, numel). Arguments: (first element,
number of elements) of each weight in the buffer, the buffer's elements, the number of ranks, a rank."""
ALIGNMENT = 2
"""A rank's part of a flat buffer is a multiple of so many elements (DeepSpeed 0.19.8, stage_1_and_2.py)."""


def contiguous(weights: Sequence[tuple[int, int]], numel: int, ranks: int, rank: int) -> Iterator[Run]:
    """The runs of DeepSpeed's own partitions: equal parts of the buffer, in the order of the ranks."""
    begin = numel // ranks * rank
    end = numel // ranks * (rank + 1)
    for index, (offset, size) in enumerate(weights):
        start = max(offset, begin)
        stop = min(offset + size, end)
        if start < stop:
            yield index, start - offset, start - begin, stop - start


def ranges_of(placement: Placement, ranks: Mapping[Axis, int]) -> tuple[Ranges, Ranges, Ranges]:
    """The leading indices, rows and columns of the shard of the rank with these ``ranks`` along the axes."""
    leading, rows, columns = (((0, size),) for size in dims_of(placement.shape))
    found: list[Ranges] = [leading, rows, columns]
    first = 0 if len(placement.shape) == 3 else 1
    for axis, sharding in placement.sharded.items():
        found[sharding.dim + first] = sharding.ranges[ranks[axis]]
    return found[0], found[1], found[2]


def copy_of(placement: Placement, ranks: Mapping[Axis, int], is_partitioned: bool) -> tuple[int, ...]:
    """Equal for ranks that hold one copy together, among them all data ranks if ``is_partitioned``."""
    axes = (*placement.copied, *(() if is_partitioned else placement.data_axes))
    return tuple(ranks[axis] for axis in axes)


def planned_holdings(
    weights: Sequence[MatrixWeight], degrees: Degrees, zero_stage: int, ranks: Sequence[int], partition: Partition
) -> list[list[WeightHolding]]:
    """The parts that each of ``ranks`` holds of ``weights`` (in the order of the model), by DeepSpeed's rules alone.

    Without ZeRO a rank steps its whole shards; ZeRO 1 and 2 (DeepSpeed 0.19.8, stage_1_and_2.py) concatenate them, the
    largest first, and cut them by ``partition``; ZeRO 3 cuts each shard. Experts are a portion of their own.
    """
    kinds = sorted({weight.placement.is_expert for weight in weights})
    found: list[list[WeightHolding]] = []
    for rank in ranks:
        held: list[WeightHolding] = []
        for portion, is_expert in enumerate(kinds):
            own = [weight for weight in weights if weight.placement.is_expert == is_expert]
            shards = _Shards(own, degrees, degrees.coordinates(rank))
            held += (shards.holding(portion, zero_stage > 0, run) for run in shards.runs(zero_stage, partition))
        found.append(held)
    return found


class _Run(NamedTuple):
    weight: int
    first: int
    numel: int
    tensor: int
    start: int


class _Shards:
    """One rank's shards of weights that are stepped together, the largest first."""

    def __init__(self, weights: Sequence[MatrixWeight], degrees: Degrees, ranks: Mapping[Axis, int]) -> None:
        shapes = {}
        for index, (placement, _) in enumerate(weights):
            dims = tuple(sum(b - a for a, b in each) for each in ranges_of(placement, ranks))
            shapes[index] = dims[3 - len(placement.shape) :]
        order = sorted(shapes, key=lambda index: shapes[index], reverse=True)
        self._weights = [weights[index] for index in order]
        self._ranks = ranks
        self._numels = [math.prod(shapes[index]) for index in order]
        self._parts, self._part = 1, 0
        for axis in weights[0].placement.data_axes:
            self._parts, self._part = self._parts * degrees.size(axis), self._part * degrees.size(axis) + ranks[axis]

    def runs(self, zero_stage: int, partition: Partition) -> Iterator[_Run]:
        numels = self._numels
        if zero_stage == 0:
            yield from (_Run(index, 0, numel, index, 0) for index, numel in enumerate(numels))
        elif zero_stage == 3:
            lengths = [-(-numel // self._parts) for numel in numels]
            starts = itertools.accumulate([0, *lengths])
            for index, (numel, length, start) in enumerate(zip(numels, lengths, starts, strict=False)):
                first = length * self._part
                if numel > first:
                    yield _Run(index, first, min(length, numel - first), 0, start)
        else:
            unit = ALIGNMENT * self._parts
            addresses = list(zip(itertools.accumulate([0, *numels]), numels, strict=False))
            runs = partition(addresses, -(-sum(numels) // unit) * unit, self._parts, self._part)
            yield from (_Run(index, first, numel, 0, start) for index, first, start, numel in runs)

    def holding(self, portion: int, is_partitioned: bool, run: _Run) -> WeightHolding:
        placement, matrix_rows = self._weights[run.weight]
        copy = copy_of(placement, self._ranks, is_partitioned)
        ranges = ranges_of(placement, self._ranks)
        return WeightHolding(placement.name, placement.shape, *ranges, *run[1:], portion, copy, matrix_rows)
