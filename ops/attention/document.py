"""Attention of one document (or of a batch of equally long ones): forward, and backward from any (out, lse).

It runs in float32 (float64 for float64) by blocks of rows, each with only the keys that its rows see.
Source: Dao 2023, FlashAttention-2, arXiv:2307.08691: the backward pass needs only the lse of the softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ds_npu.ops.attention import flash_cpu
from ds_npu.ops.attention.mask import Band, Mask
from ds_npu.ops.precision import accumulation_dtype, for_accumulation

BLOCK_SCORES = 1 << 24
"""About how many scores exist at a time: 64 MiB in float32."""


class Inputs(NamedTuple):
    """Query, key and value, or their gradients; in this file [B, N, S, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Upstream(NamedTuple):
    """The gradients of out and lse, out and lse: [B, N, S, D] and [B, N, S]."""

    dout: torch.Tensor
    dlse: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor


class Weighting(NamedTuple):
    """How scores become weights. ``pattern`` draws the dropout, in the same order in both passes; None: no dropout."""

    mask: Mask
    scale: float
    dropout_p: float = 0.0
    pattern: torch.Generator | None = None
    softcap: float | None = None

    def band(self, q: torch.Tensor, k: torch.Tensor) -> Band:
        """The mask's band for the rows of ``q`` and the keys of ``k``."""
        return self.mask.band(q.shape[2], k.shape[2]).within(q.shape[2], k.shape[2])

    def takes_flash(self, q: torch.Tensor, k: torch.Tensor) -> bool:
        """Whether torch's flash attention on the CPU computes this."""
        return (
            self.pattern is None
            and self.softcap is None
            and self.mask.dense is None
            and flash_cpu.serves(q, k, self.band(q, k))
        )


class Block(NamedTuple):
    """Some rows, the keys that any of them sees, and which keys are ``hidden``: [B, N, G, rows, keys] or broadcast."""

    rows: slice
    keys: slice
    hidden: torch.Tensor | None


def forward(inputs: Inputs, weighting: Weighting) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [B, N, S, D] and lse [B, N, S], -inf for a row that sees no key."""
    q, k, v = inputs
    scale = weighting.scale
    if weighting.takes_flash(q, k):
        return flash_cpu.forward(q, k, v, weighting.band(q, k), scale)
    # Out has the query's order of dims, as torch's kernels give it: the next operation often needs [B, S, N, D].
    out = torch.empty_like(q) if q.shape[3] == v.shape[3] else q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    for block in _blocks(inputs, weighting):
        scores = _scores(inputs, block, weighting)
        block_lse = scores.logsumexp(-1)
        weights = _weights(scores, block_lse)
        if (kept := _kept(weights, weighting)) is not None:
            weights = weights * kept
        out[:, :, block.rows] = _ungrouped(weights.flatten(2, 3) @ for_accumulation(v[:, :, block.keys]), q.shape[1])
        lse[:, :, block.rows] = block_lse.flatten(1, 2)
    return out, lse


def backward(inputs: Inputs, upstream: Upstream, weighting: Weighting) -> Inputs:
    """The gradients of ``inputs``."""
    q, k, v = inputs
    dout, dlse, out, lse = upstream
    scale = weighting.scale
    if dlse is None and weighting.takes_flash(q, k):
        return Inputs(*flash_cpu.backward(dout, inputs, (out, lse), weighting.band(q, k), scale))
    # FlashAttention-2's D: rowsum(dout * out), the term of the softmax's gradient that all keys of a row share.
    shared = (for_accumulation(dout) * for_accumulation(out)).sum(-1)
    if dlse is not None:
        shared = shared - dlse
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in (k, v))
    for block in _blocks(inputs, weighting):
        groups = (k.shape[1], -1)
        q_rows, dout_rows = (_grouped(x[:, :, block.rows], k.shape[1]) for x in (q, dout))
        scores = _scores(inputs, block, weighting)
        weights = _weights(scores, torch.unflatten(lse[:, :, block.rows], 1, groups))
        slopes = (dout_rows @ for_accumulation(v[:, :, block.keys]).mT).view_as(weights)
        kept = _kept(weights, weighting)
        if kept is not None:
            slopes = slopes * kept
        dv[:, :, block.keys] += (weights if kept is None else weights * kept).flatten(2, 3).mT @ dout_rows
        slopes = slopes - torch.unflatten(shared[:, :, block.rows], 1, groups)[..., None]
        slopes = slopes * weights * scale
        if weighting.softcap is not None:
            # The derivative of the soft cap; hidden scores have the weight 0.
            slopes = slopes * (1 - (scores.masked_fill(scores == -torch.inf, 0) / weighting.softcap).square())
        slopes = slopes.flatten(2, 3)
        dq[:, :, block.rows] = _ungrouped(slopes @ for_accumulation(k[:, :, block.keys]), q.shape[1])
        dk[:, :, block.keys] += slopes.mT @ q_rows
    return Inputs(dq, dk.to(k.dtype), dv.to(v.dtype))


def _grouped(x: torch.Tensor, key_heads: int) -> torch.Tensor:
    """[B, N, rows, D] as [B, N / group, group · rows, D]: heads that share a key are stacked."""
    return torch.unflatten(for_accumulation(x), 1, (key_heads, -1)).flatten(2, 3)


def _ungrouped(x: torch.Tensor, heads: int) -> torch.Tensor:
    return torch.unflatten(x, 2, (heads // x.shape[1], -1)).flatten(1, 2)


def _blocks(inputs: Inputs, weighting: Weighting) -> Iterator[Block]:
    batch, heads, rows, _ = inputs.q.shape
    key_heads, keys = inputs.k.shape[1:3]
    band = weighting.band(inputs.q, inputs.k)
    dense = weighting.mask.dense
    if dense is not None:
        dense = dense.expand(*dense.shape[:-2], rows, keys)
        dense = dense.view(*[1] * (4 - dense.dim()), *dense.shape)
        dense = dense.unsqueeze(2) if dense.shape[1] == 1 else torch.unflatten(dense, 1, (key_heads, -1))
    step = max(BLOCK_SCORES // max(batch * heads * keys, 1), 1)
    for begin in range(0, rows, step):
        some = range(begin, min(begin + step, rows))
        seen = band.keys_of(some, keys)
        at = slice(some.start, some.stop)
        hidden = band.hidden(some, seen, inputs.q.device) if dense is None else dense[..., at, :]
        yield Block(at, slice(seen.start, seen.stop), hidden)


def _scores(inputs: Inputs, block: Block, weighting: Weighting) -> torch.Tensor:
    """Scores [B, N / group, group, rows, keys], -inf where hidden."""
    key_heads = inputs.k.shape[1]
    q_rows = _grouped(inputs.q[:, :, block.rows], key_heads)
    scores = (q_rows @ for_accumulation(inputs.k[:, :, block.keys]).mT).mul_(weighting.scale)
    if weighting.softcap is not None:
        scores = scores.div_(weighting.softcap).tanh_().mul_(weighting.softcap)
    scores = torch.unflatten(scores, 2, (inputs.q.shape[1] // key_heads, -1))
    return scores if block.hidden is None else scores.masked_fill_(block.hidden, -torch.inf)


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    # A row without a key has the lse -inf, and weights 0.
    return (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()


def _kept(weights: torch.Tensor, weighting: Weighting) -> torch.Tensor | None:
    """The factors by which dropout multiplies the weights; None without dropout."""
    if weighting.pattern is None:
        return None
    drawn = torch.rand(weights.shape, generator=weighting.pattern, device=weights.device)
    return (drawn >= weighting.dropout_p).to(weights.dtype) / (1 - weighting.dropout_p)
