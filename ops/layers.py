"""Operators of the layers of a transformer: norms, rotary embedding, SwiGLU, softmax and cross-entropy."""

from __future__ import annotations

import torch
from torch.nn import functional

from ds_npu.operator_costs import (
    add_rms_norm_cost,
    cross_entropy_cost,
    rms_norm_cost,
    rotary_cost,
    softmax_cost,
    swiglu_cost,
)
from ds_npu.ops.operator import Operator, sample_numbers
from ds_npu.ops.precision import accumulation_dtype, for_accumulation


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """RMS norm: y = x / sqrt(mean(x²) + eps) · (weight + offset), over the last dim; ``offset`` 1 is Gemma's.

    x: [..., H], at least two dims; weight: [H]; y: like x. Computed in float32 (float64 for float64) and rounded once.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    dtype = accumulation_dtype(x.dtype)
    x_wide = x.to(dtype)
    scale = (x_wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x_wide * scale * (weight.to(dtype) + offset)).to(x.dtype)


def rms_norm_sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    x, weight = sample_numbers(dtype, (3, 5, 64), (64,))
    return x.requires_grad_(), weight.requires_grad_(), 1e-5, 1.0


rms_norm = Operator(
    "rms_norm",
    rms_norm_reference,
    kernel="ds_npu.ops.npu.layers:rms_norm",
    needs=("npu_rms_norm",),
    sample=rms_norm_sample,
    cost=rms_norm_cost,
)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMS norm of the sum, sum) for sum = x + residual, over the last dim; the sum is the next residual.

    x, residual and both results: [..., H] of one dtype, at least two dims; weight: [H]. The sum is rounded to its
    dtype, the norm is computed in float32 (float64 for float64) and rounded once.
    """
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


def add_rms_norm_sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    x, residual, weight = sample_numbers(dtype, (3, 5, 64), (3, 5, 64), (64,))
    return x.requires_grad_(), residual.requires_grad_(), weight.requires_grad_(), 1e-5


add_rms_norm = Operator(
    "add_rms_norm",
    add_rms_norm_reference,
    kernel="ds_npu.ops.npu.layers:add_rms_norm",
    needs=("npu_add_rms_norm", "npu_rms_norm"),
    sample=add_rms_norm_sample,
    cost=add_rms_norm_cost,
)


def rotary_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
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


def rotary_sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    angle_S1 = torch.rand(1, 1, 5, 1, generator=generator)
    angle = angle_S1 * torch.linspace(1.0, 0.1, 16).repeat(2)
    x_BNSD = torch.randn(2, 3, 5, 32, generator=generator).to(dtype)
    return x_BNSD.requires_grad_(), angle.cos().to(dtype), angle.sin().to(dtype)


rotary = Operator(
    "rotary",
    rotary_reference,
    kernel="ds_npu.ops.npu.layers:rotary",
    needs=("npu_rotary_mul",),
    sample=rotary_sample,
    cost=rotary_cost,
)


def swiglu_reference(gate_up: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """silu(first half of ``dim``) · second half, silu(g) = g · sigmoid(g).

    gate_up: any shape, ``dim`` even; the result has half of ``dim``. Computed in float32 (float64 for float64) and
    rounded once. Source: Shazeer 2020, arXiv:2002.05202.
    """
    gate, up = for_accumulation(gate_up).chunk(2, dim)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def swiglu_sample(dtype: torch.dtype) -> tuple[torch.Tensor]:
    return (torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_(),)


swiglu = Operator(
    "swiglu",
    swiglu_reference,
    kernel="ds_npu.ops.npu.layers:swiglu",
    needs=("npu_swiglu",),
    sample=swiglu_sample,
    cost=swiglu_cost,
)


def softmax_reference(x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
    """softmax(scale · x) over the last dim; masked elements have probability 0.

    x: [..., S, T]; mask: bool, of a shape that broadcasts to x, True = masked; the result is like x. A row that is
    wholly masked is uniform and has gradient 0. Computed in float32 (float64 for float64) and rounded once.
    """
    scores = for_accumulation(x) * scale
    if mask is not None:
        scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1).to(x.dtype)


def softmax_sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Arguments of the smallest size that the kernel takes."""
    x_BNST = torch.randn(1, 2, 32, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x_BNST.requires_grad_(), torch.ones(1, 1, 32, 32, dtype=torch.bool).triu(1), 0.5


softmax = Operator(
    "softmax",
    softmax_reference,
    kernel="ds_npu.ops.npu.layers:softmax",
    needs=("npu_scaled_masked_softmax",),
    sample=softmax_sample,
    cost=softmax_cost,
)


def cross_entropy_reference(logits_TV: torch.Tensor, targets_T: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """log(sum_v exp(logits[t, v])) - logits[t, targets[t]] for each token t; 0 where the target is ``ignore_index``.

    logits: [T, V]; targets: [T], int64; the losses: [T], in float32 (float64 for float64), for the caller to reduce.
    """
    return functional.cross_entropy(for_accumulation(logits_TV), targets_T, ignore_index=ignore_index, reduction="none")


def cross_entropy_sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    logits_TV = torch.randn(6, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    return logits_TV.requires_grad_(), torch.tensor([3, -100, 39, 0, -100, 17])


cross_entropy = Operator(
    "cross_entropy",
    cross_entropy_reference,
    kernel="ds_npu.ops.npu.layers:cross_entropy",
    needs=("npu_cross_entropy_loss",),
    sample=cross_entropy_sample,
    cost=cross_entropy_cost,
)
