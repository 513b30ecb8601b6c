"""Blockwise attention in autograd: this rank's rows attend to one block of keys and values after the other.

Ulysses, ring and gathered keys are all this function, with other blocks (``transfer.Route``). Forward merges the
results of the blocks by online softmax; backward computes every block's weights again from the merged log-sum-exp, as
FlashAttention does. Source: Liu and Abbeel 2023, arXiv:2305.19370 (blockwise); Liu, Zaharia and Abbeel 2023,
arXiv:2310.01889 (ring attention).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ds_npu.ops.attention import Dropout, Inputs, Result, attention_backward, attention_forward
from ds_npu.ops.attention.sinks import gradient_of_sinks, merge_sinks
from ds_npu.ops.autograd import Context, applied
from ds_npu.parallel.context.kernel_calls import KernelCall
from ds_npu.parallel.context.local_attention import LocalAttention
from ds_npu.parallel.context.online_softmax import LSE_DIM, Block, CallGradients, GradientSum, OnlineSoftmax

Receive = Callable[[torch.Tensor], Callable[[], torch.Tensor]]
"""Post the all-to-all of a tensor from forward again; the returned function waits for the result."""


class KeyValueSource(NamedTuple):
    """Keys and values as they were ``sent`` in forward, and how to ``receive`` one of them again."""

    sent: Block
    receive: Receive


def blockwise_attention(
    q: torch.Tensor,
    kv: Block,
    local: LocalAttention,
    source: KeyValueSource | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention [B, S, N, D] of this rank's rows q [B, S, N, D]; ``kv`` are its own keys and values.

    ``sinks`` [N] are merged once, behind the last block: their gradient is that of this rank's rows and heads.
    Backward receives the keys and values again that ``local`` does not keep: from other ring ranks, or from ``source``.
    """
    receive = None if source is None else source.receive
    return _apply(local, receive, sinks, q, *kv, *(() if source is None else source.sent))


class _AttentionContext(Context):
    local: LocalAttention
    receive: Receive | None
    dropouts: list[list[Dropout | None]]


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _AttentionContext,
        local: LocalAttention,
        receive: Receive | None,
        sinks: torch.Tensor | None,
        q: torch.Tensor,
        *keys_and_values: torch.Tensor,
    ) -> torch.Tensor:
        k, v, *sent = keys_and_values
        ctx.local = local
        ctx.receive = receive
        ctx.dropouts = []
        kept = []
        softmax = OnlineSoftmax(q.shape[1])
        # Autocast must not round float32 computations.
        with torch.autocast(q.device.type, enabled=False):
            for step, block in local.route().blocks((k, v)):
                kept += local.kept(step, block)
                calls = local.calls(step, q.shape[0] == 1)
                ctx.dropouts.append([_attend(softmax, q, block, call, local) for call in calls])
                del block  # before a further one is received
            out, lse = softmax.result(q, v.shape[3])
            if sinks is not None:
                out, lse = merge_sinks(out, lse, sinks, "BSND")
        own = (*(k, v)[: local.cached], *sent[local.cached :]) if sent else (k, v)
        ctx.save_for_backward(q, *own, out, lse, sinks, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _AttentionContext, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, sinks, *kept = ctx.saved_tensors
        own: Block = (k, v)
        if ctx.receive is not None:
            posted = [ctx.receive(x) for x in own[ctx.local.cached :]]
            own = (*own[: ctx.local.cached], *(wait() for wait in posted))
        with torch.autocast(q.device.type, enabled=False):
            rows = _Rows(ctx.local, gradients[0], q, out, lse, GradientSum(q, q.shape[1]))
            of_keys = _backward(rows, own, kept, ctx.dropouts)
            found = [x.to(like.dtype) for x, like in zip((rows.dq.total(), *of_keys), (q, *own), strict=True)]
            of_sinks = None if sinks is None else gradient_of_sinks(gradients[0], out, lse, sinks, "BSND")
        return None, None, of_sinks, *found, *(None for _ in range(len(ctx.needs_input_grad) - 6))


_apply = applied(_BlockwiseAttention, _BlockwiseAttention.forward)


def _attend(
    softmax: OnlineSoftmax, q: torch.Tensor, block: Block, call: KernelCall, local: LocalAttention
) -> Dropout | None:
    """Merge the result of one kernel call; returns its dropout."""
    k, v = (local.repeat_key_heads(call.keys.take(x)) for x in block)
    q, options = call.rows.take(q), local.options(call)
    if call.layout == "BSND":
        out, lse, dropout = attention_forward(q, k, v, options)
    else:
        out_TND, lse_TN, dropout = attention_forward(q[0], k[0], v[0], options)
        out, lse = out_TND[None], lse_TN.T[None]
    softmax.merge(call.rows, out, lse)
    return dropout


@dataclass(frozen=True, eq=False)
class _Rows:
    """This rank's rows in backward: their tensors from forward, and the sum of the query's gradients."""

    local: LocalAttention
    dout: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dq: GradientSum

    def gradients(
        self, block: Block, calls: Sequence[KernelCall], dropouts: Sequence[Dropout | None]
    ) -> Iterator[CallGradients]:
        """Yield the gradients of a block, kernel call by kernel call, computing each when it is asked for."""
        return (self._gradients(block, call, dropout) for call, dropout in zip(calls, dropouts, strict=True))

    def _gradients(self, block: Block, call: KernelCall, dropout: Dropout | None) -> CallGradients:
        local = self.local
        dout, q, out = (call.rows.take(x) for x in (self.dout, self.q, self.out))
        k, v = (local.repeat_key_heads(call.keys.take(x)) for x in block)
        lse = call.rows.take(self.lse, LSE_DIM)
        options = local.options(call)
        if call.layout == "BSND":
            found = attention_backward(dout, Inputs(q, k, v), Result(out, lse, dropout), options)
        else:
            packed = Inputs(q[0], k[0], v[0]), Result(out[0], lse[0].T, dropout)
            found = Inputs(*(x[None] for x in attention_backward(dout[0], *packed, options)))
        self.dq.add(call.rows, found.q)
        return CallGradients(
            call.keys, tuple(local.sum_repeated_heads(x, like) for x, like in zip(found[1:], block, strict=True))
        )


def _backward(rows: _Rows, own: Block, kept: list[torch.Tensor], dropouts: list[list[Dropout | None]]) -> Block:
    """The gradients of this rank's keys and values; ``kept`` and ``dropouts`` are forward's, in its order."""
    local = rows.local
    of_steps = iter(dropouts)
    still_kept = iter(kept)
    route = local.route()
    for step, received in route.blocks(own[local.cached :]):
        block = own if local.is_own(step) else (*itertools.islice(still_kept, local.cached), *received)
        calls = rows.gradients(block, local.calls(step, rows.q.shape[0] == 1), next(of_steps))
        del block, received  # so that they are freed after the last call, before anything further is received
        route.add(step, own, calls)
    return route.total(own)
