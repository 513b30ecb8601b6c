"""Rotary position embedding: pairs of dims turned by an angle that grows with the position."""

from __future__ import annotations

import torch

from ds_npu.operator_costs import rotary_cost
from ds_npu.ops.operator import Operator
from ds_npu.ops.precision import accumulation_dtype


def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """x · cos + turned(x) · sin, where turned takes each pair of dims (a, b) to (-b, a).

    x: [..., D], D even; cos, sin: of a shape that broadcasts to x, D included. The members of a pair lie D/2 apart, or
    next to each other if ``interleaved``. Computed in float32 (float64 for float64) and rounded once to x's dtype.
    Source: Su et al. 2021, arXiv:2104.09864.
    """
    dtype = accumulation_dtype(x.dtype)
    x_wide = x.to(dtype)
    if interleaved:
        turned = torch.stack((-x_wide[..., 1::2], x_wide[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = x_wide.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    return (x_wide * cos.to(dtype) + turned * sin.to(dtype)).to(x.dtype)


def sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    angle_S1 = torch.rand(1, 1, 5, 1, generator=generator)
    angle = angle_S1 * torch.linspace(1.0, 0.1, 16).repeat(2)
    x_BNSD = torch.randn(2, 3, 5, 32, generator=generator).to(dtype)
    return x_BNSD.requires_grad_(), angle.cos().to(dtype), angle.sin().to(dtype)


rotary = Operator(
    "rotary",
    reference,
    kernel="ds_npu.ops.npu.layers:rotary",
    needs=("npu_rotary_mul",),
    sample=sample,
    cost=rotary_cost,
)
