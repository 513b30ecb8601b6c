"""Buckets of a flat buffer of weights, and which elements of each bucket every data rank owns.

DeepSpeed gives rank r the r-th of n equal parts of the buffer. The gradients that a backward computes at one time then
belong to one rank or two, whose links alone would carry them. Here rank r owns the r-th part of each bucket: its
partition is those parts, one after the other. Sizes of partitions are DeepSpeed's; Megatron-LM's distributed optimizer
divides its buffers in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALIGNMENT, LEAST_ALIGNMENT = 256, 2
"""A rank's part of a bucket is a multiple of this many elements, but for the last bucket's; and of tiny buckets."""
LEAST, LEAST_OF_A_RANK = 40_000_000, 1_000_000
"""Elements of a bucket, in all and for each rank: Megatron-LM's (distributed_data_parallel.py)."""


class Bucket(NamedTuple):
    """Elements ``start`` to ``start + numel`` of the buffer."""

    start: int
    numel: int
    ranks: int

    @property
    def shard(self) -> int:
        """Elements of it that each rank owns."""
        return self.numel // self.ranks

    @property
    def owned(self) -> int:
        """The first element of a rank's shard of it in the rank's partition."""
        return self.start // self.ranks


class Run(NamedTuple):
    """Elements of one weight that are one after the other in a rank's partition."""

    weight: int
    """Its index in the group."""
    first: int
    """The first of them in the weight, flat."""
    start: int
    """The first of them in the partition."""
    numel: int


class BucketPiece(NamedTuple):
    """Elements of one weight that are one after the other in a bucket."""

    bucket: int
    start: int
    """The first of them in the bucket."""
    first: int
    """The first of them in the weight, flat."""
    numel: int


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of one buffer, which has ``weights``: (first element, number of elements) of each, in order."""

    buckets: tuple[Bucket, ...]
    weights: tuple[tuple[int, int], ...]

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
                start, stop = max(offset, begin), min(offset + numel, begin + bucket.shard)
                if start < stop:
                    yield Run(weight, start - offset, bucket.owned + start - begin, stop - start)


def bucket_elements(limits: Sequence[int], ranks: int) -> int:
    """The elements of a bucket: enough to hide the latency of a message, and not above the ``limits`` of the config."""
    elements = min(max(LEAST, LEAST_OF_A_RANK * ranks), *limits)
    unit = ranks * (ALIGNMENT if elements >= ALIGNMENT * ranks else LEAST_ALIGNMENT)
    return max(elements // unit, 1) * unit


def plan_of(weights: Sequence[tuple[int, int]], numel: int, ranks: int, elements: int) -> BucketPlan:
    """The plan of a buffer of ``numel`` elements, a multiple of ``ranks``, in buckets of ``elements`` but the last."""
    starts = range(0, numel, elements)
    buckets = tuple(Bucket(start, min(elements, numel - start), ranks) for start in starts)
    return BucketPlan(buckets, tuple(weights))
