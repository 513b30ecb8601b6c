"""One rank's share of an attention: the blocks of keys and values it gets, and its computation with each."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ds_npu.ops.attention import Mask, Options
from ds_npu.ops.precision import accumulation_dtype
from ds_npu.parallel.context.axis import ContextAxis
from ds_npu.parallel.context.kernel_calls import KernelCall, RangeSelection, block_calls, last_step
from ds_npu.parallel.context.load_balance import Tokens
from ds_npu.parallel.context.online_softmax import Block
from ds_npu.parallel.context.ring_schedule import Step
from ds_npu.parallel.context.transfer import GatherRoute, LocalRoute, RingRoute, Route

HEAD_DIM = 2
"""The dim of the heads in [B, S, N, D]."""


@dataclass(frozen=True, eq=False)
class LocalAttention:
    """This rank's share of one attention over the context axis; its tensors are [B, S, N, D].

    ``key_head_indices`` has, for each query head, the index of its key head; None where consecutive query heads share
    one evenly.
    """

    axis: ContextAxis
    tokens: Tokens
    mask: Mask
    scale: float
    dropout_p: float
    key_head_indices: tuple[int, ...] | None = None
    softcap: float | None = None

    def join_samples(self, x: torch.Tensor) -> torch.Tensor:
        """Join samples that are sharded differently to one sequence, [1, samples * S, N, D]; else return ``x``."""
        return x.flatten(0, 1)[None] if self.tokens.samples > 1 else x

    def separate_samples(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of ``join_samples``."""
        return torch.unflatten(x[0], 0, (self.tokens.samples, -1)) if self.tokens.samples > 1 else x

    def repeat_key_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values as the kernel takes them: copied only where query heads do not share them evenly."""
        return x if self.key_head_indices is None else x.index_select(HEAD_DIM, self._head_index(x.device))

    def sum_repeated_heads(self, gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The gradient of the input of ``repeat_key_heads``, which has the heads of ``like``."""
        if self.key_head_indices is None:
            return gradient
        shape = (*gradient.shape[:HEAD_DIM], like.shape[HEAD_DIM], gradient.shape[-1])
        total = gradient.new_zeros(shape, dtype=accumulation_dtype(gradient.dtype))
        return total.index_add_(HEAD_DIM, self._head_index(gradient.device), gradient.to(total.dtype))

    def _head_index(self, device: torch.device) -> torch.Tensor:
        assert self.key_head_indices is not None, "needed only for heads that are not shared evenly"
        return _heads(self.key_head_indices).index(device)

    @property
    def counts(self) -> list[int]:
        """The number of tokens of each ring rank, over all samples that ``join_samples`` joins."""
        return [count * self.tokens.samples for count in self.tokens.ring_token_counts]

    def route(self) -> Route:
        axis, algorithm = self.axis, self.axis.algorithm
        if algorithm.ring == 1:
            return LocalRoute()
        if axis.ring is None:
            return GatherRoute(axis.ring_group, axis.ring_rank, self.tokens.ring)
        single = algorithm.inner == algorithm.ring and self.mask.dense is None
        last = last_step(self.tokens, self.bounds) if single else None
        return RingRoute(axis.ring, self.counts, last)

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        return self.mask.before, self.mask.after

    def calls(self, step: Step, packs: bool) -> list[KernelCall]:
        """The kernel calls for the block of ``step``."""
        source = None if self.axis.algorithm.gather else step.source
        if self.mask.dense is None:
            return block_calls(self.tokens, self.axis.ring_rank, source, self.bounds, packs)
        rows = self.tokens.ring[self.axis.ring_rank]
        keys = (range(self.tokens.total),) if source is None else self.tokens.ring[source]
        dense = RangeSelection(keys).take(RangeSelection(rows).take(self.mask.dense, -2), -1)
        every_row, every_key = (RangeSelection([range(sum(map(len, pieces)))]) for pieces in (rows, keys))
        return [KernelCall(every_row, every_key, Mask(dense=dense), 0)]

    @property
    def cached(self) -> int:
        """How many tensors of a received block are kept: none (0), the keys (1), or keys and values (2)."""
        return {"none": 0, "half": 1, "full": 2}[self.axis.algorithm.kv_cache]

    @property
    def repeats_all_to_all(self) -> bool:
        """Whether backward repeats the Ulysses all-to-all of keys or values."""
        return self.axis.algorithm.ring == 1 < self.axis.size and self.cached < 2

    def is_own(self, step: Step) -> bool:
        """Whether the block of ``step`` is this rank's own, which is kept anyway."""
        algorithm = self.axis.algorithm
        return algorithm.ring == 1 or (not algorithm.gather and step.source == self.axis.ring_rank)

    def kept(self, step: Step, block: Block) -> list[torch.Tensor]:
        """The tensors of a received block that are kept for backward.

        Keys that are kept without values are copied, which frees their message.
        """
        if self.is_own(step):
            return []
        return [x.clone() if self.cached == 1 else x for x in block[: self.cached]]

    def options(self, call: KernelCall) -> Options:
        return Options(call.layout, call.mask, self.scale, self.dropout_p, softcap=self.softcap)


@functools.lru_cache(maxsize=64)
def _heads(indices: tuple[int, ...]) -> RangeSelection:
    """The selection of ``indices``, cached so that its index is copied to the device once."""
    return RangeSelection([range(index, index + 1) for index in indices])
