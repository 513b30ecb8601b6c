"""The parts of a stage's weights that each rank holds, by their placements and the rules of DeepSpeed's partitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ds_npu.parallel.runtime.placement import Placement
from ds_npu.parallel.whole_matrices.pieces import Ranges, WeightHolding, dims_of
from ds_npu.topology.degrees import Axis, Degrees


class MatrixWeight(NamedTuple):
    """A weight that Muon steps."""

    placement: Placement
    matrix_rows: int = 0
    """Rows of each matrix; 0: all."""


def ranges_of(placement: Placement, ranks: Mapping[Axis, int]) -> tuple[Ranges, Ranges, Ranges]:
    """The leading indices, rows and columns of the shard of the rank with these ``ranks`` along the axes."""
    leading, rows, columns = (((0, size),) for size in dims_of(placement.shape))
    found: list[Ranges] = [leading, rows, columns]
    first = 0 if len(placement.shape) == 3 else 1
    for axis, sharding in placement.sharded.items():
        found[sharding.dim + first] = sharding.ranges[ranks[axis]]
    return found[0], found[1], found[2]


def copy_of(placement: Placement, ranks: Mapping[Axis, int], is_partitioned: bool) -> tuple[int, ...]:
    """Equal for ranks that hold one copy together, the parts of data ranks if each of them has a partition."""
    axes = (*placement.copied, *(() if is_partitioned else placement.data_axes))
    return tuple(ranks[axis] for axis in axes)


def planned_holdings(
    weights: Sequence[MatrixWeight], degrees: Degrees, zero_stage: int, ranks: Sequence[int]
) -> list[list[WeightHolding]]:
    """The parts of ``weights``, in the order of the model, that each of ``ranks`` holds, by rules alone.

    Without ZeRO a rank steps its shards; ZeRO 1 and 2 (DeepSpeed 0.19.8, stage_1_and_2.py) cut all of them, the largest
    first, in equal parts; ZeRO 3 cuts each. Experts are a portion of their own.
    """
    kinds = sorted({weight.placement.is_expert for weight in weights})
    found: list[list[WeightHolding]] = []
    for rank in ranks:
        held: list[WeightHolding] = []
        for portion, is_expert in enumerate(kinds):
            own = [weight for weight in weights if weight.placement.is_expert == is_expert]
            held += _portion(own, degrees, zero_stage, degrees.coordinates(rank), portion)
        found.append(held)
    return found


def _portion(
    weights: Sequence[MatrixWeight], degrees: Degrees, zero_stage: int, ranks: Mapping[Axis, int], portion: int
) -> Iterator[WeightHolding]:
    shapes = [tuple(sum(b - a for a, b in each) for each in ranges_of(weight.placement, ranks)) for weight in weights]
    dims = [shape[3 - len(weight.placement.shape) :] for shape, weight in zip(shapes, weights, strict=True)]
    order = sorted(range(len(weights)), key=lambda index: dims[index], reverse=True)
    numels = [math.prod(shapes[index]) for index in order]
    data_axes = weights[0].placement.data_axes
    parts, part = 1, 0
    for axis in data_axes:
        parts, part = parts * degrees.size(axis), part * degrees.size(axis) + ranks[axis]
    size = -(-sum(numels) // parts)
    position = 0
    for tensor, (index, begin) in enumerate(zip(order, itertools.accumulate([0, *numels]), strict=False)):
        placement, matrix_rows = weights[index]
        numel = numels[tensor]
        if zero_stage == 0:
            run = (0, numel, tensor, 0)
        elif zero_stage == 3:
            length = -(-numel // parts)
            run = (length * part, max(min(length, numel - length * part), 0), 0, position)
            position += length
        else:
            start, stop = max(begin, size * part), min(begin + numel, size * (part + 1))
            run = (start - begin, max(stop - start, 0), 0, start - size * part)
        if run[1]:
            copy = copy_of(placement, ranks, zero_stage > 0)
            ranges = ranges_of(placement, ranks)
            yield WeightHolding(placement.name, placement.shape, *ranges, *run, portion, copy, matrix_rows)
