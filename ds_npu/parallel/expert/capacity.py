"""The capacity of an expert in tokens, the choices beyond it, padding up to it, and shares of tokens.

Padded, every expert has ``capacity`` slots for the tokens of a rank: sizes are known, and no layer waits for the host.
A slot that no token takes holds a copy of a token with the routing weight 0, which adds nothing to outputs and
gradients. Slots are ordered [capacity, experts], so that a share of consecutive slots has slots of every expert.

Source: Megatron-LM, ``core/transformer/moe/moe_utils.py`` (``get_capacity``, ``topk_routing_with_score_function``,
``moe_pad_expert_input_to_capacity``). Shape letters as in ``routing``: T tokens, K experts of each, E experts, S slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ds_npu.comm.crossing import collect, shard
from ds_npu.ops.autograd import Context, applied
from ds_npu.ops.token_permutation import token_unpermute
from ds_npu.parallel.expert.routing import Order, histogram, inverse

CapacityPolicy = Literal["probs", "position"]
"""The choices of an expert that are kept: those of the largest routing weights, or of the first tokens."""


def capacity_of(tokens: int, choices: int, experts: int, factor: float) -> int:
    """The most tokens that one of ``experts`` takes, where ``tokens`` make ``choices`` each.

    ``factor`` counts as the decimal number it prints as: 1.1 times 10 is 11, and not 12 by binary rounding.
    """
    return math.ceil(Fraction(tokens * choices, experts) * Fraction(str(factor)))


def positions_in_experts(ids_TK: torch.Tensor, order: torch.Tensor, experts: int) -> torch.Tensor:
    """[T, K] int64: how many choices of the same expert precede each choice in ``order``.

    order: a permutation [T * K] int64 of all choices. For choices of no expert (outside 0 ..
    ``experts`` - 1) the numbers have no meaning.
    """
    flat = ids_TK.reshape(-1)
    keys = torch.where((flat >= 0) & (flat < experts), flat, experts)
    by_expert = order[torch.argsort(keys[order], stable=True)]
    counts = histogram(keys, experts + 1)
    firsts = counts.cumsum(0) - counts
    return inverse(by_expert).to(torch.int64).sub(firsts[keys]).view_as(ids_TK)


def within_capacity(
    ids_TK: torch.Tensor, weights_TK: torch.Tensor, experts: int, capacity: int, policy: CapacityPolicy
) -> torch.Tensor:
    """``ids`` with -1 for every choice beyond the ``capacity`` of its expert; the host does not wait.

    ids: [T, K] int64, no expert twice for a token, -1 for none; weights: [T, K] floating, read by the policy "probs",
    which among equal weights keeps the first token's.
    """
    if policy == "probs":
        order = torch.argsort(weights_TK.detach().reshape(-1), descending=True, stable=True)
    else:
        order = torch.arange(ids_TK.numel(), device=ids_TK.device)
    return torch.where(positions_in_experts(ids_TK, order, experts) < capacity, ids_TK, -1)


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
    order, pairs, are_taken = _slots(ids_TK, experts, capacity)
    if not len(x_TH):
        # A row to copy: other ranks expect as many rows from this rank as from any.
        x_TH = functional.pad(x_TH, (0, 0, 0, 1))
        weights_TK = functional.pad(weights_TK, (0, 0, 0, 1))
    weights_S = weights_TK.flatten().index_select(0, pairs) * are_taken.to(weights_TK.dtype)
    ids_S = torch.arange(experts, device=ids_TK.device).repeat(capacity)
    rows_SH = compute(_spread(x_TH, order), ids_S.unsqueeze(1), weights_S.unsqueeze(1))
    return _collected(rows_SH, order)


def _slots(ids_TK: torch.Tensor, experts: int, capacity: int) -> tuple[Order, torch.Tensor, torch.Tensor]:
    """The order of choices by slot; of each slot [S], the index of its choice among all T * K, and whether it has one.

    The index of an empty slot is 0.
    """
    count = experts * capacity
    choices = torch.arange(ids_TK.numel(), device=ids_TK.device)
    positions_TK = positions_in_experts(ids_TK, choices, experts) * experts + ids_TK
    positions_TK = torch.where((ids_TK >= 0) & (ids_TK < experts), positions_TK, count).clamp(max=count)
    # The extra slot takes choices of no expert.
    pairs = choices.new_zeros(count + 1).scatter_(0, positions_TK.flatten(), choices)[:count]
    are_taken = choices.new_zeros(count + 1).scatter_(0, positions_TK.flatten(), 1)[:count].bool()
    return Order(pairs // max(1, ids_TK.shape[1]), positions_TK.int()), pairs, are_taken


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


Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [T, H], ids [T, K], weights [T, K]) -> [T, H], row by row."""


def compute_in_shares(
    compute: Compute, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Call ``compute`` with this rank's share of tokens that all ranks of ``group`` hold; gather the whole result.

    Where the ranks do not divide T, the last shares are padded with rows of no expert (id -1).
    """
    size, tokens = dist.get_world_size(group), len(x_TH)
    missing = -tokens % size
    padded = (0, 0, 0, missing)
    x, weights = (functional.pad(each, padded) if missing else each for each in (x_TH, weights_TK))
    ids = functional.pad(ids_TK, padded, value=-1) if missing else ids_TK
    mine = ids.chunk(size)[dist.get_rank(group)]
    out = compute(shard(x, 0, group), mine, shard(weights, 0, group))
    return collect(out, 0, group)[:tokens]
