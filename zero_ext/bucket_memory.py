"""The memory of buckets of gradients that are being filled.

A span (``bucket_plan``) is allocated with the first gradient that is written to it, and belongs to the messages of its
buckets once all of them are sent. The gradient of a weight whose elements are all in one span has a home there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_npu.zero_ext.bucket_plan import BucketPlan, Run

Key = tuple[int, int]
"""The indices of a group of weights and of a bucket of it."""


@dataclass(frozen=True)
class BucketedGroup:
    """One group of an optimizer's weights, which has a flat buffer of its own, over the data ranks that share it."""

    weights: Sequence[nn.Parameter]
    """The weights in the order of the buffer."""
    device: torch.device
    plan: BucketPlan
    ranks: dist.ProcessGroup
    size: int
    """The number of ``ranks``."""
    rank: int
    runs: tuple[Run, ...]
    """The runs of this rank's partition, in order."""

    @property
    def partition(self) -> int:
        """Elements of a rank's partition."""
        return sum(bucket.shard for bucket in self.plan.buckets)


class BucketMemory:
    """The spans of one optimizer's groups that are in use."""

    def __init__(
        self, groups: Mapping[int, BucketedGroup], dtype: Callable[[], torch.dtype], before_more: Callable[[], None]
    ) -> None:
        """``dtype`` of messages; ``before_more`` is called before a span is allocated, and may wait for messages."""
        self._groups, self._dtype, self._before_more = groups, dtype, before_more
        self._is_host: bool = get_accelerator().is_synchronized_device()
        self._homes: dict[int, tuple[int, int, int, torch.Size]] = {}
        """The group of each weight, the span that holds it, its first element there, and its shape, by id."""
        self._in_spans: dict[Key, tuple[Key, int, int]] = {}
        """The span of each bucket, the bucket's first element in it, and its elements."""
        self._used: Counter[Key] = Counter()
        """Elements of each span that weights have; others are padding."""
        for index, group in groups.items():
            for number, bucket in enumerate(group.plan.buckets):
                start = bucket.start - group.plan.spans[bucket.span].start
                self._in_spans[index, number] = (index, bucket.span), start, bucket.numel
            for position, weight in enumerate(group.weights):
                if (home := group.plan.home(position)) is not None:
                    self._homes[id(weight)] = index, *home, weight.shape
                for piece in group.plan.pieces(position):
                    self._used[index, group.plan.buckets[piece.bucket].span] += piece.numel
        self._spans: dict[Key, torch.Tensor] = {}
        self._unsent: Counter[Key] = Counter()
        """How many buckets of each span in use are not sent."""
        self._streams: dict[Key, set[Any]] = {}
        """The streams that write to each span in use."""
        self._given: dict[Key, set[int]] = {}
        """The first elements of the homes that were given, in each span in use."""

    def spans(self) -> Iterator[torch.Tensor]:
        """The memory of the spans in use."""
        yield from self._spans.values()

    def bucket(self, key: Key) -> torch.Tensor:
        """A bucket [elements] that is not sent; the current stream may write to it. Padding in it is zero."""
        span, start, numel = self._in_spans[key]
        return self._span(span)[start : start + numel]

    def home(self, weight: nn.Parameter, dtype: torch.dtype) -> torch.Tensor | None:
        """The memory [the weight's shape] for a gradient of ``dtype``; None where its buckets cannot hold it as it is.

        The current stream may write to it, before the buckets are sent. It is given once, then None: a gradient in it
        may be set apart for a while (a pipeline's, of earlier batches), and the next must not be written over it.
        """
        if id(weight) not in self._homes or dtype != self._dtype():
            return None
        index, number, start, shape = self._homes[id(weight)]
        span = self._span((index, number))
        given = self._given.setdefault((index, number), set())
        if start in given:
            return None
        given.add(start)
        return span[start : start + shape.numel()].view(shape)

    def is_home(self, weight: nn.Parameter, gradient: torch.Tensor) -> bool:
        """Whether ``gradient`` is the memory of its weight's home."""
        if id(weight) not in self._homes:
            return False
        index, span, start, _ = self._homes[id(weight)]
        found = self._spans.get((index, span))
        return found is not None and gradient.data_ptr() == found.data_ptr() + start * found.element_size()

    def take(self, key: Key) -> torch.Tensor:
        """Take a bucket, all of which is written, to send it.

        The current stream waits for the streams that wrote to it.
        """
        bucket = self.bucket(key)
        span, _, _ = self._in_spans[key]
        for stream in self._streams.get(span, ()):
            get_accelerator().current_stream().wait_stream(stream)
        self._unsent[span] -= 1
        if not self._unsent[span]:
            for kept in (self._spans, self._unsent, self._streams, self._given):
                kept.pop(span, None)
        return bucket

    def _span(self, key: Key) -> torch.Tensor:
        group = self._groups[key[0]]
        if key not in self._spans:
            self._before_more()
            numel = group.plan.spans[key[1]].numel
            make = torch.empty if self._used[key] == numel else torch.zeros
            self._spans[key] = make(numel, dtype=self._dtype(), device=group.device)
            self._unsent[key] = sum(span == key for span, _, _ in self._in_spans.values())
        if not self._is_host:
            self._streams.setdefault(key, set()).add(get_accelerator().current_stream())
        return self._spans[key]
