"""Experts that take equally many rows each: sizes are known without counting, and no layer waits for the host.

Every expert has ``capacity`` slots for the tokens of a rank. Slots that no token takes are copies of a token with the
routing weight 0, so that they add nothing to outputs and gradients. Slots are ordered place by place, and in each place
expert by expert: a share of the places has slots of every expert. Source: Megatron-LM
(``moe_pad_expert_input_to_capacity``).
Shape letters: T tokens, K experts of each, S slots, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ds_npu.ops.autograd import Context, applied
from ds_npu.ops.token_permutation import token_unpermute
from ds_npu.parallel.expert.capacity import places_in_experts
from ds_npu.parallel.expert.routing import Order
from ds_npu.parallel.expert.shares import Compute


def compute_padded(
    compute: Compute,
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    experts: int,
    capacity: int,
) -> torch.Tensor:
    """``compute`` of ``experts`` * ``capacity`` rows with one expert each; returns the sums [T, H] over each token's.

    ids: [T, K] int64, at most ``capacity`` of each expert, -1 for none.
    """
    slots = _Slots.of(ids_TK, experts, capacity)
    if not len(x_TH):
        # Something to copy: the other ranks expect as many rows of this one as of any.
        x_TH, weights_TK = functional.pad(x_TH, (0, 0, 0, 1)), functional.pad(weights_TK, (0, 0, 0, 1))
    weights_S = weights_TK.flatten().index_select(0, slots.pairs) * slots.are_taken.to(weights_TK.dtype)
    ids_S = torch.arange(experts, device=ids_TK.device).repeat(capacity)
    rows_SH = compute(_spread(x_TH, slots.order), ids_S.unsqueeze(1), weights_S.unsqueeze(1))
    return _collected(rows_SH, slots.order)


@dataclass(frozen=True)
class _Slots:
    """Which choice of which token is in which slot."""

    order: Order
    pairs: torch.Tensor
    """[S] int64: the choice, of all T * K; 0 in slots that none has."""
    are_taken: torch.Tensor
    """[S] bool."""

    @staticmethod
    def of(ids_TK: torch.Tensor, experts: int, capacity: int) -> _Slots:
        count, choices = experts * capacity, torch.arange(ids_TK.numel(), device=ids_TK.device)
        places_TK = places_in_experts(ids_TK, choices, experts) * experts + ids_TK
        places_TK = torch.where((ids_TK >= 0) & (ids_TK < experts), places_TK, count).clamp(max=count)
        # One more, for choices of no expert.
        pairs = choices.new_zeros(count + 1).scatter_(0, places_TK.flatten(), choices)[:count]
        are_taken = choices.new_zeros(count + 1).scatter_(0, places_TK.flatten(), 1)[:count].bool()
        return _Slots(Order(pairs // max(1, ids_TK.shape[1]), places_TK.int()), pairs, are_taken)


class _OrderContext(Context):
    order: Order
    tokens: int


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _OrderContext, x_TH: torch.Tensor, order: Order) -> torch.Tensor:
        ctx.order, ctx.tokens = order, len(x_TH)
        return order.permuted(x_TH)

    @staticmethod
    @once_differentiable
    def backward(ctx: _OrderContext, drows_SH: torch.Tensor) -> tuple[torch.Tensor, None]:
        dx_TH = token_unpermute(drows_SH, ctx.order.places)
        return functional.pad(dx_TH, (0, 0, 0, ctx.tokens - len(dx_TH))), None


class _Collected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _OrderContext, rows_SH: torch.Tensor, order: Order) -> torch.Tensor:
        ctx.order = order
        return token_unpermute(rows_SH, order.places)

    @staticmethod
    @once_differentiable
    def backward(ctx: _OrderContext, dout_TH: torch.Tensor) -> tuple[torch.Tensor, None]:
        if not len(dout_TH):
            return dout_TH.new_zeros(len(ctx.order.rows), dout_TH.shape[1]), None
        # What a slot without a token gets is multiplied by its weight, 0.
        return ctx.order.permuted(dout_TH), None


_spread, _collected = applied(_Spread, _Spread.forward), applied(_Collected, _Collected.forward)
