"""The capacity of an expert in tokens, and the choices beyond it. Tensors only, no ranks.

Source: Megatron-LM, ``core/transformer/moe/moe_utils.py`` (``get_capacity``, ``topk_routing_with_score_function``).
Shape letters as in ``routing``: T tokens, K experts of each, E experts.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal

import torch

from ds_npu.parallel.expert.routing import histogram, inverse

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
