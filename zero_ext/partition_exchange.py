"""Reorders partitions of an optimizer's state between the order of buckets and DeepSpeed's order.

Both orders give each of n data ranks as many elements of the flat buffer; in DeepSpeed's, rank r has the r-th of n
equal parts. Each rank sends the elements that other ranks have in the other order, in windows, to bound the memory.
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


class Transfer(NamedTuple):
    """Elements that one rank sends to another, or keeps: they are one after the other in both orders."""

    sender: int
    start: int
    """Index of the first element in the sender's partition."""
    receiver: int
    first: int
    """Index of the first element in the receiver's."""
    numel: int

    def back(self) -> Transfer:
        """The transfer in the other direction."""
        return Transfer(self.receiver, self.first, self.sender, self.start, self.numel)

    def within(self, low: int, high: int) -> Transfer:
        """The part that goes to ``low`` to ``high`` of the receiver's partition."""
        begin = max(self.first, low)
        end = min(self.first + self.numel, high)
        return self._replace(start=self.start + begin - self.first, first=begin, numel=max(end - begin, 0))


def transfers_of(plan: BucketPlan) -> list[Transfer]:
    """All transfers from the order of buckets to DeepSpeed's, in the order of the buffer."""
    partition = sum(bucket.shard for bucket in plan.buckets)
    found = []
    for bucket in plan.buckets:
        for rank in range(bucket.ranks if bucket.shard else 0):
            start, stop = bucket.start + rank * bucket.shard, bucket.start + (rank + 1) * bucket.shard
            first = start
            while first < stop:
                receiver, position = divmod(first, partition)
                numel = min(stop - first, partition - position)
                found.append(Transfer(rank, bucket.owned + first - start, receiver, position, numel))
                first += numel
    return found


def to_plain(
    x: torch.Tensor, out: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup, waits: bool = True
) -> torch.Tensor:
    """Write a rank's partition in DeepSpeed's order into ``out``; ``x``: its partition in the order of buckets.

    Both flat and of one dtype, on the device or on the host. All ranks of ``group`` call it. Without ``waits``, for
    pinned memory, ``out`` has its values once the current stream has come so far.
    """
    return _exchange(x, out, transfers_of(plan), group, waits)


def to_bucketed(x: torch.Tensor, out: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup) -> torch.Tensor:
    """Write a rank's partition in the order of buckets into ``out``; ``x``: its partition in DeepSpeed's order."""
    return _exchange(x, out, [each.back() for each in transfers_of(plan)], group, waits=True)


@torch.no_grad()
def _exchange(
    x: torch.Tensor, out: torch.Tensor, transfers: Sequence[Transfer], group: dist.ProcessGroup, waits: bool
) -> torch.Tensor:
    device = get_accelerator().current_device_name()
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    others = []
    for each in transfers:
        if each.sender == each.receiver == rank:
            own = x[each.start : each.start + each.numel]
            out[each.first : each.first + each.numel].copy_(own, non_blocking=not waits)
        elif each.sender != each.receiver:
            others.append(each)
    for low in range(0, out.numel() if others else 0, WINDOW):
        inside = [part for each in others if (part := each.within(low, low + WINDOW)).numel]
        # Sorted by rank, and for one rank by its elements, as the receiver takes them.
        sent = sorted((each for each in inside if each.sender == rank), key=lambda each: (each.receiver, each.first))
        received = sorted(
            (each for each in inside if each.receiver == rank), key=lambda each: (each.sender, each.first)
        )
        to, of = [0] * ranks, [0] * ranks
        for each in sent:
            to[each.receiver] += each.numel
        for each in received:
            of[each.sender] += each.numel
        parts = [x[each.start : each.start + each.numel].to(device) for each in sent]
        rows = exchange_rows(torch.cat(parts) if parts else x.new_empty(0, device=device), to, of, group).wait()
        arrived = torch.split(rows, [each.numel for each in received])
        for each, values in zip(received, arrived, strict=True):
            out[each.first : each.first + each.numel].copy_(values, non_blocking=not waits)
    return out
