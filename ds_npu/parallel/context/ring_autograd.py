"""Attention of this rank's rows to one block of keys after the other, in autograd."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ds_npu.ops.attention import Dropout, Inputs, Result, attention_backward, attention_forward
from ds_npu.parallel.context.kernel_calls import Call
from ds_npu.parallel.context.local_attention import Work
from ds_npu.parallel.context.online_softmax import LSE_DIM, Block, Merged, Part, Summed


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
                calls = work.calls(step, q.shape[0] == 1)
                ctx.dropouts.append([_attend(merged, q, block, call, work) for call in calls])
                del block  # before a further one is received
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
            rows = _Rows(ctx.work, gradients[0], q, out, lse, Summed(q, q.shape[1]))
            of_keys = _backward(rows, own, kept, ctx.dropouts)
            found = [x.to(like.dtype) for x, like in zip((rows.dq.total(), *of_keys), (q, *own), strict=True)]
        return None, None, *found, *(None for _ in range(len(ctx.needs_input_grad) - 5))


def _attend(merged: Merged, q: torch.Tensor, block: Block, call: Call, work: Work) -> Dropout | None:
    """Merge the result of one call; its dropout."""
    k, v = (work.for_queries(call.keys.take(x)) for x in block)
    q, options = call.rows.take(q), work.options(call)
    if call.layout == "BSND":
        out, lse, dropout = attention_forward(q, k, v, options)
    else:
        out_TND, lse_TN, dropout = attention_forward(q[0], k[0], v[0], options)
        out, lse = out_TND[None], lse_TN.T[None]
    merged.add(call.rows, out, lse)
    return dropout


@dataclass(frozen=True, eq=False)
class _Rows:
    """A rank's rows in backward: what is known of them, and the gradient of the query, summed."""

    work: Work
    dout: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dq: Summed

    def parts(self, block: Block, calls: Sequence[Call], dropouts: Sequence[Dropout | None]) -> Iterator[Part]:
        """The gradients of a block by calls, computed as they are taken."""
        return (self._part(block, call, dropout) for call, dropout in zip(calls, dropouts, strict=True))

    def _part(self, block: Block, call: Call, dropout: Dropout | None) -> Part:
        work = self.work
        dout, q, out = (call.rows.take(x) for x in (self.dout, self.q, self.out))
        k, v = (work.for_queries(call.keys.take(x)) for x in block)
        lse, options = call.rows.take(self.lse, LSE_DIM), work.options(call)
        if call.layout == "BSND":
            found = attention_backward(dout, Inputs(q, k, v), Result(out, lse, dropout), options)
        else:
            packed = Inputs(q[0], k[0], v[0]), Result(out[0], lse[0].T, dropout)
            found = Inputs(*(x[None] for x in attention_backward(dout[0], *packed, options)))
        self.dq.add(call.rows, found.q)
        return Part(call.keys, tuple(work.of_keys(x, like) for x, like in zip(found[1:], block, strict=True)))


def _backward(rows: _Rows, own: Block, kept: list[torch.Tensor], dropouts: list[list[Dropout | None]]) -> Block:
    """The gradients of this rank's keys and values; ``kept`` and ``dropouts`` are forward's, in its order."""
    work, of_steps, still_kept = rows.work, iter(dropouts), iter(kept)
    route = work.route()
    gradients = route.gradients(own)
    for step, came in route.blocks(own[work.cached :]):
        block = own if work.is_own(step) else (*itertools.islice(still_kept, work.cached), *came)
        parts = rows.parts(block, work.calls(step, rows.q.shape[0] == 1), next(of_steps))
        del block, came  # they go when the last part is computed, before anything further is received
        gradients.add(step, parts)
    return gradients.total()
