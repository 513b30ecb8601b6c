"""Attention to several blocks of keys, one after the other: its result so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ds_npu.ops.attention.document import wide
from ds_npu.parallel.context.kernel_calls import Places

Block = tuple[torch.Tensor, ...]
"""Keys and values (or one of them, or none) of some tokens, each [B, S, N, D]."""

LSE_DIM = 2


class Merged:
    """Out [B, S, N, D] and lse [B, N, S] of rows over all keys so far; a row that has seen none has 0 and -inf.

    Two results over other keys are weighted by their sums of exponentials: with w = sigmoid(lse_2 - lse_1), out is
    out_1 + w (out_2 - out_1) and lse is log(exp lse_1 + exp lse_2), in float32, float64 for float64. Source: Milakov
    2018, arXiv:1805.02867; Dao 2023, arXiv:2307.08691.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.out: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None

    def add(self, places: Places, out: torch.Tensor, lse: torch.Tensor) -> None:
        """What the rows at ``places`` see in further keys; both tensors are given away."""
        every = places.one is not None and len(places.one) == self.rows
        if self.out is None or self.lse is None:
            if every:
                self.out, self.lse = out, lse
                return
            self._start(out, lse)
            assert self.out is not None and self.lse is not None
        if self.out.dtype != wide(self.out.dtype):
            self.out = self.out.to(wide(self.out.dtype))
        before = places.take(self.lse, LSE_DIM)
        # Of two rows without a key the difference is nan.
        weight = torch.sigmoid(lse - before).nan_to_num(nan=0.0)
        weight = weight.transpose(1, 2).unsqueeze(-1)
        together = torch.logaddexp(before, lse)
        if places.one is not None:
            places.take(self.out).lerp_(out.to(self.out.dtype), weight)
            before.copy_(together)
        else:
            index = places.index(out.device)
            mixed = places.take(self.out).lerp_(out.to(self.out.dtype), weight)
            self.out.index_copy_(1, index, mixed)
            self.lse.index_copy_(LSE_DIM, index, together)

    def _start(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        self.out = out.new_zeros(out.shape[0], self.rows, *out.shape[2:])
        self.lse = lse.new_full((*lse.shape[:2], self.rows), -torch.inf)

    def result(self, q: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Out in the dtype of the query [B, S, N, D], whose values are ``width`` wide, and lse."""
        if self.out is None or self.lse is None:
            batch, rows, heads = q.shape[:3]
            lse = q.new_full((batch, heads, rows), -torch.inf, dtype=wide(q.dtype))
            return q.new_zeros(batch, rows, heads, width), lse
        return self.out.to(q.dtype), self.lse


class Summed:
    """The sum of what is added at places of [B, ``tokens``, N, D]: in float32 at least, unless it is one addend."""

    def __init__(self, like: torch.Tensor, tokens: int) -> None:
        self.like, self.tokens = like, tokens
        self.sum: torch.Tensor | None = None

    def add(self, places: Places, x: torch.Tensor) -> None:
        """``x`` is given away."""
        if self.sum is None and places.one is not None and len(places.one) == self.tokens:
            self.sum = x
            return
        self.sum = self.total()
        if self.sum.dtype != wide(self.sum.dtype):
            self.sum = self.sum.to(wide(self.sum.dtype))
        places.add(self.sum, x)

    def total(self) -> torch.Tensor:
        if self.sum is None:
            shape = (self.like.shape[0], self.tokens, *self.like.shape[2:])
            return self.like.new_zeros(shape, dtype=wide(self.like.dtype))
        return self.sum


class Part(NamedTuple):
    """The gradients of what is at some places of a block."""

    places: Places
    gradients: Block

    def add_to(self, totals: Sequence[Summed]) -> None:
        """To those of the block's tensors; the gradients are given away."""
        for total, gradient in zip(totals, self.gradients, strict=True):
            total.add(self.places, gradient)


def summed(like: Block, tokens: int, parts: Iterator[Part]) -> Block:
    """The gradients of a block of ``tokens`` tokens, otherwise shaped as ``like``, each part's taken as it comes."""
    totals = [Summed(x, tokens) for x in like]
    for part in parts:
        part.add_to(totals)
        del part  # before the next one is computed
    return tuple(total.total() for total in totals)
