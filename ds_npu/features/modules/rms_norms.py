"""The eps of an RMS norm of any class, what it adds to its weight, and the dtype of its result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ds_npu.features.modules.equivalence import (
    computes_the_same,
    forward_of_copy,
    isolated_on_cpu,
    own_forward,
    random_input,
)
from ds_npu.models import kinds
from ds_npu.models.attributes import attributes
from ds_npu.ops.layers import rms_norm

OFFSETS = (0.0, 1.0)
"""Numbers that may be added to the weight: 0, or 1 (Gemma)."""


def rms_norm_arguments(module: nn.Module) -> tuple[float, float, bool] | str:
    """(eps, offset, widens) of the RMS norm that ``module`` computes, or why it is taken for none.

    ``widens``: whether its result has the dtype of a weight that is wider than what comes in.
    """
    shapes = kinds.own_shapes(module)
    if list(shapes) != ["weight"]:
        return f"{type(module).__name__} has {' and '.join(shapes) or 'no parameter'}, where an RMS norm has a weight"
    if reason := own_forward(module):
        return reason
    if not _epsilons(module):
        return f"{type(module).__name__} has no number that could be its eps"
    with isolated_on_cpu() as generator:
        weight = nn.Parameter(random_input(generator, *shapes["weight"]).detach())
        x = random_input(generator, 2, 3, *shapes["weight"])
        theirs = forward_of_copy(module, {"weight": weight}, {})
        for eps in _epsilons(module):
            # Rows around the root of eps, which show its value, and rows far above it.
            inputs = (x.detach() * torch.tensor([3 * eps**0.5, 1.0], dtype=x.dtype).view(2, 1, 1)).requires_grad_()
            for offset in OFFSETS:
                if computes_the_same(theirs, lambda x, e=eps, o=offset: rms_norm(x, weight, e, o), inputs):
                    return eps, offset, _widens(theirs, x, weight)
    return f"{type(module).__name__} computes something else than an RMS norm"


def _epsilons(module: nn.Module) -> list[float]:
    """The attributes of ``module`` that may be its eps."""
    return list(dict.fromkeys(value for value in attributes(module, float).values() if 0 < value < 1))


def _widens(theirs: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, weight: nn.Parameter) -> bool:
    """Whether the result has the dtype of a weight that is wider than x."""
    weight.data = weight.data.float()
    return bool(theirs(x.detach().bfloat16()).dtype == torch.float32)
