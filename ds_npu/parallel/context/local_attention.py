"""One rank's part of an attention: which blocks come to it, and what is computed with each."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ds_npu.ops.attention import Mask, Options
from ds_npu.ops.attention.document import wide
from ds_npu.parallel.context.axis import ContextAxis
from ds_npu.parallel.context.kernel_calls import Call, Places, block_calls, last_step
from ds_npu.parallel.context.load_balance import Tokens
from ds_npu.parallel.context.online_softmax import Block
from ds_npu.parallel.context.ring_schedule import Step
from ds_npu.parallel.context.transfer import GatherRoute, RingRoute, Route, Stay

HEAD_DIM = 2
"""Of [B, S, N, D]."""


@dataclass(frozen=True, eq=False)
class Work:
    """One attention of the whole axis, as this rank sees it; its tensors are [B, S, N, D].

    ``repeated`` is for each query head the place of its key head, None where consecutive ones share one evenly.
    """

    axis: ContextAxis
    tokens: Tokens
    mask: Mask
    scale: float
    dropout_p: float
    repeated: tuple[int, ...] | None = None

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        """Samples that are split differently are one sequence."""
        return x.flatten(0, 1)[None] if self.tokens.samples > 1 else x

    def batched(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of ``flat``."""
        return torch.unflatten(x[0], 0, (self.tokens.samples, -1)) if self.tokens.samples > 1 else x

    def for_queries(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values as the kernel takes them: copied only where query heads do not share them evenly."""
        return x if self.repeated is None else x.index_select(HEAD_DIM, self._heads(x.device))

    def of_keys(self, gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The gradient of what ``for_queries`` was given, whose heads are those of ``like``."""
        if self.repeated is None:
            return gradient
        shape = (*gradient.shape[:HEAD_DIM], like.shape[HEAD_DIM], gradient.shape[-1])
        total = gradient.new_zeros(shape, dtype=wide(gradient.dtype))
        return total.index_add_(HEAD_DIM, self._heads(gradient.device), gradient.to(total.dtype))

    def _heads(self, device: torch.device) -> torch.Tensor:
        assert self.repeated is not None, "asked only of heads that are not shared evenly"
        return _places(self.repeated).index(device)

    @property
    def counts(self) -> list[int]:
        """Tokens of each ring rank, of all samples that are one sequence."""
        return [count * self.tokens.samples for count in self.tokens.counts_of_ring]

    def route(self) -> Route:
        axis, algorithm = self.axis, self.axis.algorithm
        if algorithm.ring == 1:
            return Stay()
        if axis.ring is None:
            return GatherRoute(axis.ring_group, axis.ring_rank, self.tokens.ring)
        single = algorithm.inner == algorithm.ring and self.mask.dense is None
        last = last_step(self.tokens, self.bounds) if single else None
        return RingRoute(axis.ring, self.counts, last)

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        return self.mask.before, self.mask.after

    def calls(self, step: Step, packs: bool) -> list[Call]:
        """Of the block of ``step``."""
        source = None if self.axis.algorithm.gather else step.source
        if self.mask.dense is None:
            return block_calls(self.tokens, self.axis.ring_rank, source, self.bounds, packs)
        rows = self.tokens.ring[self.axis.ring_rank]
        keys = (range(self.tokens.total),) if source is None else self.tokens.ring[source]
        dense = Places(keys).take(Places(rows).take(self.mask.dense, -2), -1)
        every_row, every_key = (Places([range(sum(map(len, pieces)))]) for pieces in (rows, keys))
        return [Call(every_row, every_key, Mask(dense=dense), 0)]

    @property
    def cached(self) -> int:
        """How many of keys and values are kept of a block that was received: 0, the keys (1), or both (2)."""
        return {"none": 0, "half": 1, "full": 2}[self.axis.algorithm.kv_cache]

    @property
    def exchanges_again(self) -> bool:
        """Whether backward receives from its Ulysses ranks what it needs of keys and values."""
        return self.axis.algorithm.ring == 1 < self.axis.size and self.cached < 2

    def is_own(self, step: Step) -> bool:
        """Whether the block of ``step`` is this rank's, which is kept anyway."""
        algorithm = self.axis.algorithm
        return algorithm.ring == 1 or (not algorithm.gather and step.source == self.axis.ring_rank)

    def kept(self, step: Step, block: Block) -> list[torch.Tensor]:
        """What of a block that was received is kept for backward; a part of a message alone is copied out of it."""
        if self.is_own(step):
            return []
        return [x.clone() if self.cached == 1 else x for x in block[: self.cached]]

    def options(self, call: Call) -> Options:
        return Options(call.layout, call.mask, self.scale, self.dropout_p)


@functools.lru_cache(maxsize=64)
def _places(numbers: tuple[int, ...]) -> Places:
    """Kept, for it keeps its index on the device."""
    return Places([range(number, number + 1) for number in numbers])
