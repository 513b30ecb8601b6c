"""Online softmax: attention to several blocks of keys, one after the other, merged by log-sum-exp.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867; Dao 2023, FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ds_npu.ops.precision import accumulation_dtype, for_accumulation
from ds_npu.parallel.context.kernel_calls import RangeSelection

Block = tuple[torch.Tensor, ...]
"""Keys and values (or one of them, or none) of some tokens, each [B, S, N, D]."""

LSE_DIM = 2


class OnlineSoftmax:
    """Out [B, S, N, D] and lse [B, N, S] of rows over all keys so far; 0 and -inf for a row that has seen no key.

    Log-sum-exp merge of two results over different keys: with w = sigmoid(lse_2 - lse_1), out is
    out_1 + w (out_2 - out_1) and lse is log(exp lse_1 + exp lse_2), in float32 (float64 for float64).
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.out: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None

    def merge(self, rows: RangeSelection, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge the attention of ``rows`` to further keys; both tensors may be overwritten."""
        every = rows.single is not None and len(rows.single) == self.rows
        if self.out is None or self.lse is None:
            if every:
                self.out, self.lse = out, lse
                return
            self.out = out.new_zeros(out.shape[0], self.rows, *out.shape[2:])
            self.lse = lse.new_full((*lse.shape[:2], self.rows), -torch.inf)
        self.out = for_accumulation(self.out)
        before = rows.take(self.lse, LSE_DIM)
        # The difference is nan where neither result has seen a key.
        weight = torch.sigmoid(lse - before).nan_to_num(nan=0.0)
        weight = weight.transpose(1, 2).unsqueeze(-1)
        merged = torch.logaddexp(before, lse)
        if rows.single is not None:
            rows.take(self.out).lerp_(out.to(self.out.dtype), weight)
            before.copy_(merged)
        else:
            index = rows.index(out.device)
            mixed = rows.take(self.out).lerp_(out.to(self.out.dtype), weight)
            self.out.index_copy_(1, index, mixed)
            self.lse.index_copy_(LSE_DIM, index, merged)

    def result(self, q: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Out in the dtype of the query [B, S, N, D], whose values are ``width`` wide, and lse."""
        if self.out is None or self.lse is None:
            batch, rows, heads = q.shape[:3]
            lse = q.new_full((batch, heads, rows), -torch.inf, dtype=accumulation_dtype(q.dtype))
            return q.new_zeros(batch, rows, heads, width), lse
        return self.out.to(q.dtype), self.lse


class GradientSum:
    """The sum [B, ``tokens``, N, D] of gradients that each cover some of the tokens.

    It is in the accumulation dtype, unless one gradient covers all tokens.
    """

    def __init__(self, like: torch.Tensor, tokens: int) -> None:
        self.like, self.tokens = like, tokens
        self.sum: torch.Tensor | None = None

    def add(self, rows: RangeSelection, x: torch.Tensor) -> None:
        """Add ``x`` to the tokens ``rows``; ``x`` may be overwritten."""
        if self.sum is None and rows.single is not None and len(rows.single) == self.tokens:
            self.sum = x
            return
        self.sum = for_accumulation(self.total())
        rows.add(self.sum, x)

    def total(self) -> torch.Tensor:
        if self.sum is None:
            shape = (self.like.shape[0], self.tokens, *self.like.shape[2:])
            return self.like.new_zeros(shape, dtype=accumulation_dtype(self.like.dtype))
        return self.sum


class CallGradients(NamedTuple):
    """The gradients of the keys and values that one kernel call read."""

    keys: RangeSelection
    gradients: Block

    def add_to(self, totals: Sequence[GradientSum]) -> None:
        """Add the gradients to the sums of the block's tensors; the gradients may be overwritten."""
        for total, gradient in zip(totals, self.gradients, strict=True):
            total.add(self.keys, gradient)


def sum_of_calls(like: Block, tokens: int, calls: Iterator[CallGradients]) -> Block:
    """The gradients of a block of ``tokens`` tokens, otherwise shaped as ``like``; each call's are added as it ends."""
    totals = [GradientSum(x, tokens) for x in like]
    for call in calls:
        call.add_to(totals)
        del call  # before the next one is computed
    return tuple(total.total() for total in totals)
