"""Experts that take equally many rows each, so that sizes are known and no layer waits for the host.

Every expert has ``capacity`` slots for the tokens of a rank. A slot that no token takes holds a copy of a token with
the routing weight 0, which adds nothing to outputs and gradients. Slots are ordered [capacity, experts], so that a
share of consecutive slots has slots of every expert. Source: Megatron-LM (``moe_pad_expert_input_to_capacity``).
Shape letters: T tokens, K experts of each, S slots, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ds_npu.ops.autograd import Context, applied
from ds_npu.ops.token_permutation import token_unpermute
from ds_npu.parallel.expert.capacity import positions_in_experts
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
    """Call ``compute`` with ``experts * capacity`` rows of one expert each; return each token's sum [T, H] of its rows.

    ids: [T, K] int64, at most ``capacity`` of each expert, -1 for none.
    """
    slots = _Slots.of(ids_TK, experts, capacity)
    if not len(x_TH):
        # A row to copy: other ranks expect as many rows from this rank as from any.
        x_TH, weights_TK = functional.pad(x_TH, (0, 0, 0, 1)), functional.pad(weights_TK, (0, 0, 0, 1))
    weights_S = weights_TK.flatten().index_select(0, slots.pairs) * slots.are_taken.to(weights_TK.dtype)
    ids_S = torch.arange(experts, device=ids_TK.device).repeat(capacity)
    rows_SH = compute(_spread(x_TH, slots.order), ids_S.unsqueeze(1), weights_S.unsqueeze(1))
    return _collected(rows_SH, slots.order)


@dataclass(frozen=True)
class _Slots:
    """The assignment of choices of tokens to slots."""

    order: Order
    pairs: torch.Tensor
    """[S] int64: the index of the choice among all T * K; 0 in empty slots."""
    are_taken: torch.Tensor
    """[S] bool: False in empty slots."""

    @staticmethod
    def of(ids_TK: torch.Tensor, experts: int, capacity: int) -> _Slots:
        count, choices = experts * capacity, torch.arange(ids_TK.numel(), device=ids_TK.device)
        positions_TK = positions_in_experts(ids_TK, choices, experts) * experts + ids_TK
        positions_TK = torch.where((ids_TK >= 0) & (ids_TK < experts), positions_TK, count).clamp(max=count)
        # The extra slot takes choices of no expert.
        pairs = choices.new_zeros(count + 1).scatter_(0, positions_TK.flatten(), choices)[:count]
        are_taken = choices.new_zeros(count + 1).scatter_(0, positions_TK.flatten(), 1)[:count].bool()
        return _Slots(Order(pairs // max(1, ids_TK.shape[1]), positions_TK.int()), pairs, are_taken)


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
        dx_TH = token_unpermute(drows_SH, ctx.order.positions)
        return functional.pad(dx_TH, (0, 0, 0, ctx.tokens - len(dx_TH))), None


class _Collected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _OrderContext, rows_SH: torch.Tensor, order: Order) -> torch.Tensor:
        ctx.order = order
        return token_unpermute(rows_SH, order.positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: _OrderContext, dout_TH: torch.Tensor) -> tuple[torch.Tensor, None]:
        if not len(dout_TH):
            return dout_TH.new_zeros(len(ctx.order.rows), dout_TH.shape[1]), None
        # The gradient of an empty slot is multiplied by its weight, 0.
        return ctx.order.permuted(dout_TH), None


_spread, _collected = applied(_Spread, _Spread.forward), applied(_Collected, _Collected.forward)
