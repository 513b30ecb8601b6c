"""Softmax of scaled scores with a mask."""

from __future__ import annotations

import torch

from ds_npu.operator_costs import softmax_cost
from ds_npu.ops.operator import Operator
from ds_npu.ops.precision import for_accumulation


def reference(x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
    """softmax(scale · x) over the last dim; masked elements have probability 0.

    x: [..., S, T]; mask: bool, of a shape that broadcasts to x, True = masked; the result is like x. A row that is
    wholly masked is uniform and has gradient 0. Computed in float32 (float64 for float64) and rounded once.
    """
    scores = for_accumulation(x) * scale
    if mask is not None:
        scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1).to(x.dtype)


def sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Arguments of the smallest size that the kernel takes."""
    x_BNST = torch.randn(1, 2, 32, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x_BNST.requires_grad_(), torch.ones(1, 1, 32, 32, dtype=torch.bool).triu(1), 0.5


softmax = Operator(
    "softmax",
    reference,
    kernel="ds_npu.ops.npu.layers:softmax",
    needs=("npu_scaled_masked_softmax",),
    sample=sample,
    cost=softmax_cost,
)
