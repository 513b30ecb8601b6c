"""SwiGLU: one half of a dim, through SiLU, times the other half."""

from __future__ import annotations

import torch
from torch.nn import functional

from ds_npu.operator_costs import swiglu_cost
from ds_npu.ops.operator import Operator
from ds_npu.ops.precision import for_accumulation


def reference(gate_up: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """silu(first half of ``dim``) · second half, silu(g) = g · sigmoid(g).

    gate_up: any shape, ``dim`` even; the result has half of ``dim``. Computed in float32 (float64 for float64) and
    rounded once. Source: Shazeer 2020, arXiv:2002.05202.
    """
    gate, up = for_accumulation(gate_up).chunk(2, dim)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def sample(dtype: torch.dtype) -> tuple[torch.Tensor]:
    return (torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_(),)


swiglu = Operator(
    "swiglu", reference, kernel="ds_npu.ops.npu.layers:swiglu", needs=("npu_swiglu",), sample=sample, cost=swiglu_cost
)
