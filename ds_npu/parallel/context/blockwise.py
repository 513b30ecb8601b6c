"""Attention of this rank's rows to one block of keys after the other, in autograd."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ds_npu.ops.attention import Dropout, Inputs, Result, attention_backward, attention_forward
from ds_npu.parallel.context.calls import Call
from ds_npu.parallel.context.merge import LSE_DIM, Merged, Summed
from ds_npu.parallel.context.transfer import Block
from ds_npu.parallel.context.work import Work


class Origin(NamedTuple):
    """Where keys and values come from that can be had again: what was sent, and what begins to receive one of them
    again and returns what waits for it."""

    sent: Block
    receive: Callable[[torch.Tensor], Callable[[], torch.Tensor]]


def blockwise_attention(q: torch.Tensor, kv: Block, work: Work, origin: Origin | None = None) -> torch.Tensor:
    """Out [B, S, N, D] of the rows q [B, S, N, D] of ``work``, whose own keys and values are ``kv``.

    What ``work`` does not keep of keys and values is received again in backward: from other ring ranks, or, if they
    have an ``origin``, from there.
    """
    function: Any = _Attend  # torch's apply has no types
    again = None if origin is None else origin.receive
    out: torch.Tensor = function.apply(work, again, q, *kv, *(() if origin is None else origin.sent))
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, work: Work, again: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sent: torch.Tensor
    ) -> torch.Tensor:
        ctx.work, ctx.again, ctx.dropouts, kept = work, again, [], []
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
        own = (*(k, v)[: work.cached], *sent[work.cached :]) if sent else (k, v)
        ctx.save_for_backward(q, *own, out, lse, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, *kept = ctx.saved_tensors
        own = (k, v)
        if ctx.again is not None:
            coming = [ctx.again(x) for x in own[ctx.work.cached :]]
            own = (*own[: ctx.work.cached], *(wait() for wait in coming))
        with torch.autocast(q.device.type, enabled=False):
            found = _backward(ctx.work, gradients[0], _Saved(q, own, out, lse, kept, ctx.dropouts))
        return None, None, *found, *(None for _ in range(len(ctx.needs_input_grad) - 5))


class _Saved(NamedTuple):
    """What backward knows of forward: ``kept`` as ``Work.kept``, one after the other."""

    q: torch.Tensor
    own: Block
    out: torch.Tensor
    lse: torch.Tensor
    kept: list[torch.Tensor]
    dropouts: list[list[Dropout | None]]


def _forward(q: torch.Tensor, block: Block, call: Call, work: Work) -> Result:
    k, v = (call.keys.take(x) for x in block)
    q, options = call.rows.take(q), work.options(call)
    if call.layout == "BSND":
        return attention_forward(q, k, v, options)
    out, lse, dropout = attention_forward(q[0], k[0], v[0], options)
    return Result(out[None], lse.T[None], dropout)


def _backward(work: Work, dout: torch.Tensor, saved: _Saved) -> tuple[torch.Tensor, ...]:
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
    dout: torch.Tensor, block: Block, call: Call, dropout: Dropout | None, work: Work, saved: _Saved
) -> Inputs:
    dout, q, out = (call.rows.take(x) for x in (dout, saved.q, saved.out))
    k, v = (call.keys.take(x) for x in block)
    lse, options = call.rows.take(saved.lse, LSE_DIM), work.options(call)
    if call.layout == "BSND":
        return attention_backward(dout, Inputs(q, k, v), Result(out, lse, dropout), options)
    packed = attention_backward(dout[0], Inputs(q[0], k[0], v[0]), Result(out[0], lse[0].T, dropout), options)
    return Inputs(*(x[None] for x in packed))
