"""Addition of a residual, and RMS norm of the sum; the sum is the next residual."""

from __future__ import annotations

import torch

from ds_npu.operator_costs import add_rms_norm_cost
from ds_npu.ops import rms_norm
from ds_npu.ops.operator import Operator


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMS norm of the sum, sum) for sum = x + residual, over the last dim.

    x, residual and both results: [..., H] of one dtype, at least two dims; weight: [H]. The sum is rounded to its
    dtype, the norm is computed in float32 (float64 for float64) and rounded once.
    """
    total = x + residual
    return rms_norm.reference(total, weight, eps), total


def sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(3, 5, 64, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    return x, residual, torch.randn(64, generator=generator).to(dtype).requires_grad_(), 1e-5


add_rms_norm = Operator(
    "add_rms_norm",
    reference,
    kernel="ds_npu.ops.npu.add_rms_norm:add_rms_norm",
    needs=("npu_add_rms_norm", "npu_rms_norm"),
    sample=sample,
    cost=add_rms_norm_cost,
)
