"""Attention over a sequence whose tokens are spread over the context ranks: Ulysses, ring, both, or gathered keys."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ds_npu.ops.attention import Dropout, Inputs, Mask, Options, Result, attention_backward, attention_forward
from ds_npu.ops.attention.options import by_head, laid_out, sizes_of
from ds_npu.parallel.context.axis import ContextAxis
from ds_npu.parallel.context.calls import Call, Places, block_calls, last_step
from ds_npu.parallel.context.merge import LSE_DIM, Merged, Summed
from ds_npu.parallel.context.ring import Step
from ds_npu.parallel.context.tokens import Tokens, split_documents, split_evenly
from ds_npu.parallel.context.transfer import Block, GatherRoute, RingRoute, Route, Stay


def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    axis: ContextAxis,
    options: Options | None = None,
    tokens: Tokens | None = None,
) -> torch.Tensor:
    """This rank's rows of attention over the whole sequence, laid out as ``q``, with the values' width.

    q [B, S / cp, N, D] (by ``options.layout``), k and v alike with fewer heads, v with a width of its own: those of
    ``tokens`` that this rank has. Without ``tokens`` the sequence has as many on every rank: contiguous ones with
    Ulysses, else ``split_evenly``'s; in layout TND ``split_documents``'s of the mask's documents. ``options.mask`` is
    of the whole sequence: its bounds, or a ``dense`` one [..., S, S]; attention never crosses ``tokens.documents``.
    Accumulates in float32 (float64 for float64). Raises ValueError where sizes, mask and tokens do not go together.
    """
    options = options or Options()
    q, k, v = (
        by_head(x, options.layout, n).transpose(1, 2) for x, n in zip((q, k, v), _heads(q, k, options), strict=True)
    )
    tokens = tokens or _usual(q.shape[1], axis, options.mask)
    work = _work(q, k, v, axis, options, tokens)
    q, k, v = (work.flat(x) for x in (q, k, v))
    out = work.batched(_attend(q, k, v, work))
    return laid_out(out.transpose(1, 2), options.layout)


def _heads(q: torch.Tensor, k: torch.Tensor, options: Options) -> tuple[int, int, int]:
    """The heads of query, key and value, which only layout SBH does not show."""
    if options.layout != "SBH":
        return 0, 0, 0
    of_keys = k.shape[2] * options.heads // q.shape[2]
    return options.heads, of_keys, of_keys


def _usual(tokens: int, axis: ContextAxis, mask: Mask) -> Tokens:
    if mask.ends_q:
        documents = [range(begin, end) for begin, end in itertools.pairwise((0, *mask.ends_q))]
        return split_documents(1, mask.ends_q[-1], documents, axis.algorithm)
    return split_evenly(tokens * axis.size, axis.algorithm)


@dataclass(frozen=True, eq=False)
class _Work:
    """One attention of the whole axis, as this rank sees it; its tensors are [B, S, N, D]."""

    axis: ContextAxis
    tokens: Tokens
    mask: Mask
    scale: float
    dropout_p: float

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        """Samples that are split differently are one sequence."""
        return x.flatten(0, 1)[None] if self.tokens.samples > 1 else x

    def batched(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of ``flat``."""
        return torch.unflatten(x[0], 0, (self.tokens.samples, -1)) if self.tokens.samples > 1 else x

    @property
    def counts(self) -> list[int]:
        """Tokens of each ring rank, of all samples that are one sequence."""
        return [count * self.tokens.samples for count in self.tokens.counts_of_ring()]

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


def _work(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axis: ContextAxis, options: Options, tokens: Tokens
) -> _Work:
    """Raises ValueError for what does not go together."""
    sizes_of(q, k, v, Options("BSND"))
    wanted = tokens.count(axis.rank)
    if q.shape[1] != wanted or k.shape[1] != wanted or tokens.samples not in (1, q.shape[0]):
        raise ValueError(
            f"context rank {axis.rank} of {axis.size} has {wanted} tokens of each of {tokens.samples} samples of "
            f"{tokens.length}; found q {list(q.shape)} and k {list(k.shape)} [B, S, N, D]: give it the tokens "
            "that Tokens.index names"
        )
    if len(tokens.ring) != axis.algorithm.ring or tokens.ulysses != axis.algorithm.ulysses:
        raise ValueError(
            f"the tokens are split over {len(tokens.ring)} x {tokens.ulysses} ranks, not for {axis.algorithm}"
        )
    mask, whole = options.mask, tokens.length
    if mask.dense is not None and (
        tokens.total != whole or len(tokens.documents) > 1 or mask.dense.shape[-2:] != (whole, whole)
    ):
        raise ValueError(
            f"a dense mask {list(mask.dense.shape)} must be the whole [..., {whole}, {whole}] on each context "
            "rank, with documents and padding in it"
        )
    scale = float(q.shape[3] ** -0.5) if options.scale is None else options.scale
    return _Work(axis, tokens, replace(mask, ends_q=(), ends_k=()), scale, options.dropout_p)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: _Work) -> torch.Tensor:
    function: Any = _Attend  # torch's apply has no types
    out: torch.Tensor = function.apply(work, q, k, v)
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.work, ctx.dropouts, kept = work, [], []
        merged = Merged(q.shape[1])
        # What is computed in float32 stays so, also under autocast.
        with torch.autocast(q.device.type, enabled=False):
            for step, block in work.route().blocks((k, v)):
                kept += work.kept(step, block)
                patterns = []
                for call in work.calls(step, q.shape[0] == 1):
                    out, lse, dropout = _forward(q, block, call, work)
                    merged.add(call.rows, out, lse)
                    patterns.append(dropout)
                ctx.dropouts.append(patterns)
            out, lse = merged.result(q, v.shape[3])
        ctx.save_for_backward(q, k, v, out, lse, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, *kept = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            return None, *_backward(ctx.work, gradients[0], _Saved(q, (k, v), out, lse, kept, ctx.dropouts))


class _Saved(NamedTuple):
    """What backward knows of forward: ``kept`` as ``_Work.kept``, one after the other."""

    q: torch.Tensor
    own: Block
    out: torch.Tensor
    lse: torch.Tensor
    kept: list[torch.Tensor]
    dropouts: list[list[Dropout | None]]


def _forward(q: torch.Tensor, block: Block, call: Call, work: _Work) -> Result:
    k, v = (call.keys.take(x) for x in block)
    q, options = call.rows.take(q), work.options(call)
    if call.layout == "BSND":
        return attention_forward(q, k, v, options)
    out, lse, dropout = attention_forward(q[0], k[0], v[0], options)
    return Result(out[None], lse.T[None], dropout)


def _backward(work: _Work, dout: torch.Tensor, saved: _Saved) -> tuple[torch.Tensor, ...]:
    route, kept = work.route(), iter(saved.kept)
    gradients = route.gradients(saved.own)
    dq = Summed(saved.q, saved.q.shape[1])
    travelling = saved.own[work.cached :]
    for (step, came), patterns in zip(route.blocks(travelling), saved.dropouts, strict=True):
        block = saved.own if work.is_own(step) else (*itertools.islice(kept, work.cached), *came)
        of_block = [Summed(x, x.shape[1]) for x in block]
        calls = work.calls(step, dout.shape[0] == 1)
        for call, dropout in zip(calls, patterns, strict=True):
            of_call = _gradients(dout, block, call, dropout, work, saved)
            for total, places, gradient in zip(
                (dq, *of_block), (call.rows, call.keys, call.keys), of_call, strict=True
            ):
                total.add(places, gradient)
        gradients.add(step, tuple(each.total() for each in of_block))
    totals = (dq.total(), *gradients.total())
    return tuple(total.to(x.dtype) for total, x in zip(totals, (saved.q, *saved.own), strict=True))


def _gradients(
    dout: torch.Tensor, block: Block, call: Call, dropout: Dropout | None, work: _Work, saved: _Saved
) -> Inputs:
    dout, q, out = (call.rows.take(x) for x in (dout, saved.q, saved.out))
    k, v = (call.keys.take(x) for x in block)
    lse, options = call.rows.take(saved.lse, LSE_DIM), work.options(call)
    if call.layout == "BSND":
        return attention_backward(dout, Inputs(q, k, v), Result(out, lse, dropout), options)
    packed = attention_backward(dout[0], Inputs(q[0], k[0], v[0]), Result(out[0], lse[0].T, dropout), options)
    return Inputs(*(x[None] for x in packed))
