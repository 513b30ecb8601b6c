"""RMS norm: each row divided by its root mean square, times a weight."""

from __future__ import annotations

import torch

from ds_npu.operator_costs import rms_norm_cost
from ds_npu.ops.operator import Operator
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
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, 64, generator=generator).to(dtype)
    return x.requires_grad_(), torch.randn(64, generator=generator).to(dtype).requires_grad_(), 1e-5, 1.0


rms_norm = Operator(
    "rms_norm",
    reference,
    kernel="ds_npu.ops.npu.rms_norm:rms_norm",
    needs=("npu_rms_norm",),
    sample=sample,
    cost=rms_norm_cost,
)
