"""RMS norm: each row divided by its root mean square, times a weight; alone, or after the addition of a residual."""

from __future__ import annotations

import torch

from ds_npu.operator_costs import add_rms_norm_cost, rms_norm_cost
from ds_npu.ops.operator import Operator, sample_numbers
from ds_npu.ops.precision import accumulation_dtype


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """y = x / sqrt(mean(x²) + eps) · (weight + offset), over the last dim; ``offset`` 1 is Gemma's.

    x: [..., H], at least two dims; weight: [H]; y: like x. Computed in float32 (float64 for float64) and rounded once.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    dtype = accumulation_dtype(x.dtype)
    x_wide = x.to(dtype)
    scale = (x_wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x_wide * scale * (weight.to(dtype) + offset)).to(x.dtype)


def sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    x, weight = sample_numbers(dtype, (3, 5, 64), (64,))
    return x.requires_grad_(), weight.requires_grad_(), 1e-5, 1.0


rms_norm = Operator(
    "rms_norm",
    reference,
    kernel="ds_npu.ops.npu.layers:rms_norm",
    needs=("npu_rms_norm",),
    sample=sample,
    cost=rms_norm_cost,
)


def add_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMS norm of the sum, sum) for sum = x + residual, over the last dim; the sum is the next residual.

    x, residual and both results: [..., H] of one dtype, at least two dims; weight: [H]. The sum is rounded to its
    dtype, the norm is computed in float32 (float64 for float64) and rounded once.
    """
    total = x + residual
    return reference(total, weight, eps), total


def add_sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    x, residual, weight = sample_numbers(dtype, (3, 5, 64), (3, 5, 64), (64,))
    return x.requires_grad_(), residual.requires_grad_(), weight.requires_grad_(), 1e-5


add_rms_norm = Operator(
    "add_rms_norm",
    add_reference,
    kernel="ds_npu.ops.npu.layers:add_rms_norm",
    needs=("npu_add_rms_norm", "npu_rms_norm"),
    sample=add_sample,
    cost=add_rms_norm_cost,
)
