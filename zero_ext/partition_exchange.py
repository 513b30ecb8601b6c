"""Partitions of an optimizer's state in the order of buckets, and in DeepSpeed's order, one from the other.

Both orders give each of n data ranks as many elements of the flat buffer; DeepSpeed's the r-th n-th of it. Each rank
sends the elements that others have in the other order, in windows, so that the memory that it takes is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_npu.comm.collectives import exchange_rows
from ds_npu.zero_ext.bucket_plan import BucketPlan

WINDOW = 1 << 24
"""Elements that a rank receives at one time, at most."""


class Segment(NamedTuple):
    """Elements that are one after the other in both orders."""

    bucketed_rank: int
    bucketed_start: int
    """Their first in that rank's partition in the order of buckets."""
    plain_rank: int
    plain_start: int
    """Their first in that rank's partition in DeepSpeed's order."""
    numel: int


def segments_of(plan: BucketPlan) -> list[Segment]:
    """All segments of a buffer, in its order."""
    partition = sum(bucket.shard for bucket in plan.buckets)
    found = []
    for bucket in plan.buckets:
        for rank in range(bucket.ranks if bucket.shard else 0):
            start, stop = bucket.start + rank * bucket.shard, bucket.start + (rank + 1) * bucket.shard
            first = start
            while first < stop:
                plain_rank, plain_start = divmod(first, partition)
                numel = min(stop - first, partition - plain_start)
                found.append(Segment(rank, bucket.owned + first - start, plain_rank, plain_start, numel))
                first += numel
    return found


def to_plain(x: torch.Tensor, out: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup) -> torch.Tensor:
    """Write a rank's partition in DeepSpeed's order into ``out``; ``x``: its partition in the order of buckets.

    Both flat and of one dtype, on the device or on the host. All ranks of ``group`` call it.
    """
    return _exchange(x, out, segments_of(plan), group)


def to_bucketed(x: torch.Tensor, out: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup) -> torch.Tensor:
    """Write a rank's partition in the order of buckets into ``out``; ``x``: its partition in DeepSpeed's order."""
    moves = [(each[2], each[3], each[0], each[1], each[4]) for each in segments_of(plan)]
    return _exchange(x, out, moves, group)


Transfer = tuple[int, int, int, int, int]
"""The sender and its first element, the receiver and its first, and their number."""


@torch.no_grad()
def _exchange(x: torch.Tensor, out: torch.Tensor, moves: Sequence[Transfer], group: dist.ProcessGroup) -> torch.Tensor:
    device = get_accelerator().current_device_name()
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for low in range(0, out.numel(), WINDOW):
        inside = [_within(each, low, low + WINDOW) for each in moves]
        sent = [each for each in inside if each[0] == rank and each[4] > 0]
        received = [each for each in inside if each[2] == rank and each[4] > 0]
        # In the order of the ranks, and within one in that of its elements, as the receiver takes them.
        sent.sort(key=lambda each: (each[2], each[3]))
        received.sort(key=lambda each: (each[0], each[3]))
        parts = [x[start : start + numel].to(device) for _, start, _, _, numel in sent]
        whole = torch.cat(parts) if parts else x.new_empty(0, device=device)
        to = [sum(each[4] for each in sent if each[2] == other) for other in range(ranks)]
        of = [sum(each[4] for each in received if each[0] == other) for other in range(ranks)]
        rows, first = exchange_rows(whole, to, of, group).wait(), 0
        for *_, start, numel in received:
            out[start : start + numel].copy_(rows[first : first + numel])
            first += numel
    return out


def _within(move: Transfer, low: int, high: int) -> Transfer:
    """The part of a move that its receiver has at ``low`` to ``high``."""
    sender, start, receiver, first, numel = move
    begin, end = max(first, low), min(first + numel, high)
    return sender, start + begin - first, receiver, begin, max(end - begin, 0)
