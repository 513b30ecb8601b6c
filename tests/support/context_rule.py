"""Context-parallel attention against one process: softmax of the whole score matrix in float64, plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.ops.attention import FULL, Mask, Options
from ds_npu.parallel.context.attention import context_attention
from ds_npu.parallel.context.axis import ContextAxis
from ds_npu.parallel.context.load_balance import Tokens, shard_documents, shard_evenly

HEADS = {"mha": (8, 8, 4, 4), "gqa": (8, 2, 4, 4), "mqa": (8, 1, 4, 4), "mla": (8, 8, 6, 4)}
"""Heads of the query, of key and value, widths of key and value."""


@dataclass(frozen=True)
class Case:
    """One attention of B samples of S tokens; ``documents`` are of the flattened batch, "" where samples are whole."""

    heads: str = "mha"
    mask: Mask = FULL
    batch: int = 2
    length: int = 32
    documents: tuple[range, ...] = ()
    zigzag: bool = True
    softcap: float | None = None
    has_sinks: bool = False

    def tokens(self, algorithm: ContextAlgorithm) -> Tokens:
        if self.documents:
            return shard_documents(self.batch, self.length, self.documents, algorithm)
        return shard_evenly(self.length, algorithm, self.zigzag)

    def seen(self) -> torch.Tensor:
        """[B, 1, S, S], or with the heads of a dense mask: which keys a row sees."""
        if self.mask.dense is not None:
            dense = self.mask.dense
            return ~dense.view(*[1] * (4 - dense.dim()), *dense.shape).expand(self.batch, -1, -1, -1)
        at = torch.arange(self.length)
        distance = at - at[:, None]
        seen = torch.ones(self.length, self.length, dtype=torch.bool)
        if self.mask.before is not None:
            seen &= distance >= -self.mask.before
        if self.mask.after is not None:
            seen &= distance <= self.mask.after
        number = torch.zeros(self.batch * self.length, dtype=torch.long)
        for index, document in enumerate(self.documents):
            number[document.start : document.stop] = index + 1
        if not self.documents:
            number += 1
        number = number.view(self.batch, self.length)
        together = (number[:, :, None] == number[:, None, :]) & (number > 0)[:, :, None]
        return (seen & together)[:, None]

    def sinks(self) -> torch.Tensor | None:
        """A score [N] of one more key for each head, without a value."""
        count = HEADS[self.heads][0]
        drawn = torch.randn(count, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        return drawn.requires_grad_() if self.has_sinks else None

    def inputs(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Query, key, value and the gradient of out, [B, S, N, D], the same at every call."""
        heads, key_heads, width, value_width = HEADS[self.heads]
        draw = torch.Generator().manual_seed(7)
        shapes = (heads, width), (key_heads, width), (key_heads, value_width), (heads, value_width)
        return [
            torch.randn(self.batch, self.length, *shape, generator=draw, dtype=torch.float64).to(dtype)
            for shape in shapes
        ]


def whole_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Out [B, S, N, D]; 0 for a row that sees no key."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bsnd,btnd->bnst", q, k) * q.shape[3] ** -0.5
    if case.softcap is not None:
        scores = torch.tanh(scores / case.softcap) * case.softcap
    scores = scores.masked_fill(~case.seen(), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1).nan_to_num(nan=0.0)[..., : case.length]
    return torch.einsum("bnst,btnd->bsnd", weights, v)


def reference(case: Case) -> list[torch.Tensor]:
    """Out and the gradients of query, key, value, and of sinks if there are any, of the whole batch."""
    q, k, v, dout = case.inputs(torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sinks = case.sinks()
    out = whole_attention(*leaves, case, sinks)
    return [out.detach(), *torch.autograd.grad(out, leaves if sinks is None else [*leaves, sinks], dout)]


def own(x: torch.Tensor, tokens: Tokens, rank: int) -> torch.Tensor:
    """Context rank ``rank``'s tokens of [B, S, ...]."""
    index = tokens.index(rank).expand(x.shape[0], -1)
    return x.gather(1, index.view(*index.shape, *[1] * (x.dim() - 2)).expand(*index.shape, *x.shape[2:]))


def errors(axis: ContextAxis, case: Case, dtype: torch.dtype = torch.float64) -> list[float]:
    """Relative to the largest number of the reference: out, dq, dk, dv of this rank, and the sinks' gradient."""
    tokens = case.tokens(axis.algorithm)
    *inputs, dout = (own(x, tokens, axis.rank) for x in case.inputs(dtype))
    leaves = [x.requires_grad_() for x in inputs]
    sinks = case.sinks()
    options = Options(mask=case.mask, softcap=case.softcap, sinks=sinks)
    out = context_attention(*leaves, axis, options, tokens)
    found = [out.detach(), *torch.autograd.grad(out, leaves if sinks is None else [*leaves, sinks], dout)]
    expected = [own(x, tokens, axis.rank) if x.dim() > 1 else x for x in reference(case)]
    if sinks is not None:
        dist.all_reduce(found[-1], group=axis.topology.group("cp"))
    return [
        ((one.double() - other).abs().max() / other.abs().max()).item()
        for one, other in zip(found, expected, strict=True)
    ]
