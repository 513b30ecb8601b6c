"""A weight gradient, added to a buffer in the buffer's dtype (Megatron-LM: gradient accumulation fusion)."""

from __future__ import annotations

import torch

from ds_npu.operator_costs import matmul_accumulate_cost
from ds_npu.ops.operator import Operator, sample_numbers


@torch.no_grad()
def reference(buffer: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """buffer += dyᵀ x, in place, and the buffer is returned; no gradient is recorded.

    buffer: [out, in], float32 or float64; dy: [T, out] and x: [T, in], of one dtype, usually a lower one. The sums over
    T are in the buffer's dtype, and no separate product of its size is held.
    """
    return buffer.addmm_(dy.to(buffer.dtype).t(), x.to(buffer.dtype))


def sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    buffer, dy, x = sample_numbers(torch.float32, (16, 32), (8, 16), (8, 32))
    return buffer, dy.to(dtype), x.to(dtype)


matmul_accumulate_ = Operator(
    "matmul_accumulate",
    reference,
    kernel="ds_npu.ops.npu.experts:matmul_accumulate_",
    needs=("npu_grouped_matmul_add_",),
    sample=sample,
    cost=matmul_accumulate_cost,
)
