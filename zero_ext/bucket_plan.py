"""Buckets of a flat buffer of weights, and which elements of each bucket every data rank owns.

DeepSpeed gives rank r the r-th of n equal parts of the buffer. The gradients that a backward computes at one time then
belong to one rank or two, whose links alone would carry them. Here rank r owns the r-th part of each bucket: its
partition is those parts, one after the other. Sizes of partitions are DeepSpeed's; Megatron-LM's distributed optimizer
divides its buffers in the same way.

The buckets of a span are one tensor while gradients are in them. Spans hold whole weights, so that a weight's gradient
is one view of a span, and the product that computes it can write there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALIGNMENT, LEAST_ALIGNMENT = 256, 2
"""A rank's part of a bucket is a multiple of the first; in tiny buckets, and in the last of a span, of the second."""
LEAST, LEAST_OF_A_RANK = 40_000_000, 1_000_000
"""Least elements of a bucket, in all and for each rank, as in Megatron-LM (distributed_data_parallel.py)."""


class Bucket(NamedTuple):
    """Elements ``start`` to ``start + numel`` of the buffer."""

    start: int
    numel: int
    ranks: int
    span: int
    """The index of its span."""

    @property
    def shard(self) -> int:
        """Elements of it that each rank owns."""
        return self.numel // self.ranks

    @property
    def owned(self) -> int:
        """Index in a rank's partition at which the rank's shard of the bucket begins."""
        return self.start // self.ranks


class Run(NamedTuple):
    """Elements of one weight that are one after the other in a rank's partition."""

    weight: int
    """Its index in the group."""
    first: int
    """Index of the first element in the weight, flat."""
    start: int
    """Index of the first element in the partition."""
    numel: int


class BucketPiece(NamedTuple):
    """Elements of one weight that are one after the other in a bucket."""

    bucket: int
    start: int
    """Index of the first element in the bucket."""
    first: int
    """Index of the first element in the weight, flat."""
    numel: int


class BucketSpan(NamedTuple):
    """Elements ``start`` to ``start + numel`` of the buffer, which are those of one or several buckets."""

    start: int
    numel: int


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of one buffer, which has ``weights``: (first element, number of elements) of each, in order."""

    buckets: tuple[Bucket, ...]
    spans: tuple[BucketSpan, ...]
    weights: tuple[tuple[int, int], ...]

    def home(self, weight: int) -> tuple[int, int] | None:
        """The span that holds all of a weight, and the weight's first element in it; None where no span does."""
        offset, numel = self.weights[weight]
        for index, (start, size) in enumerate(self.spans):
            if start <= offset and offset + numel <= start + size:
                return index, offset - start
        return None

    def pieces(self, weight: int) -> Iterator[BucketPiece]:
        """The pieces of a weight, in order."""
        offset, numel = self.weights[weight]
        for index, bucket in enumerate(self.buckets):
            start, stop = max(offset, bucket.start), min(offset + numel, bucket.start + bucket.numel)
            if start < stop:
                yield BucketPiece(index, start - bucket.start, start - offset, stop - start)

    def runs(self, rank: int) -> Iterator[Run]:
        """The runs in the partition of ``rank``, in order; between and behind them is padding."""
        for bucket in self.buckets:
            begin = bucket.start + rank * bucket.shard
            for weight, (offset, numel) in enumerate(self.weights):
                start = max(offset, begin)
                stop = min(offset + numel, begin + bucket.shard)
                if start < stop:
                    yield Run(weight, start - offset, bucket.owned + start - begin, stop - start)


def bucket_elements(limits: Sequence[int], ranks: int) -> int:
    """The elements of a bucket: enough to hide the latency of a message, and not above the ``limits`` of the config."""
    return _whole_units(min(max(LEAST, LEAST_OF_A_RANK * ranks), *limits), ranks)


def _whole_units(elements: int, ranks: int) -> int:
    unit = ranks * (ALIGNMENT if elements >= ALIGNMENT * ranks else LEAST_ALIGNMENT)
    return max(elements // unit, 1) * unit


def bucketed_runs(
    limits: Sequence[int], weights: Sequence[tuple[int, int]], numel: int, ranks: int, rank: int
) -> Iterator[Run]:
    """The runs in the partition of ``rank``, by the plan of these weights (``plan_of``)."""
    return plan_of(weights, numel, ranks, limits).runs(rank)


def plan_of(weights: Sequence[tuple[int, int]], numel: int, ranks: int, limits: Sequence[int]) -> BucketPlan:
    """The plan of a buffer of ``numel`` elements, a multiple of ``ranks``; no bucket is above the ``limits``.

    A span holds the fewest whole weights that fill a bucket, and is cut into equal buckets, nearest to
    ``bucket_elements``. It may end within a weight, so that all ranks' parts are of whole elements.
    """
    elements = bucket_elements(limits, ranks)
    most = _whole_units(min(limits), ranks)
    ends = [offset + size for offset, size in weights]
    unit = ranks * math.gcd(elements // ranks, ALIGNMENT)
    buckets: list[Bucket] = []
    spans: list[BucketSpan] = []
    start = 0
    while start < numel:
        end = next((each for each in ends if each >= start + elements), numel)
        stop = min(start + -(-(end - start) // (ranks * LEAST_ALIGNMENT)) * ranks * LEAST_ALIGNMENT, numel)
        if numel - stop < elements // 2:
            stop = numel
        total = stop - start
        count = max(round(total / elements), -(-total // most), 1)
        size = min(-(-total // (count * unit)) * unit, most)
        for first in range(start, stop, size):
            buckets.append(Bucket(first, min(size, stop - first), ranks, len(spans)))
        spans.append(BucketSpan(start, total))
        start = stop
    return BucketPlan(tuple(buckets), tuple(spans), tuple(weights))
