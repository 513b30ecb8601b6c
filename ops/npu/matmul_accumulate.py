"""A weight gradient added to a float32 buffer with torch_npu."""

from __future__ import annotations

import torch
import torch_npu

from ds_npu.ops import matmul_accumulate as operator

LARGEST_SIDE = 65535
"""Longest side of a matrix, by the documentation of npu_grouped_matmul_add_ in torch_npu 2.13 (_op_plugin_docs.py)."""


@torch.no_grad()
def matmul_accumulate_(buffer: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``ds_npu.ops.matmul_accumulate``: a grouped product with one group (aclnnGroupedMatmulAdd), straight into buffer.

    The kernel takes bf16 and fp16 only; addmm itself accumulates float32. torch_npu.npu_matmul_add_fp32 would be the
    kernel for it, but it is in the ATB library, which not every CANN has.
    """
    low = dy.dtype == x.dtype and dy.dtype in (torch.bfloat16, torch.float16)
    if not low or not buffer.is_contiguous() or max(buffer.shape) > LARGEST_SIDE or not dy.shape[0]:
        return operator.reference(buffer, dy, x)
    # The device fills it: nothing is copied from the host, so it does not wait.
    group_end = torch.full((1,), dy.shape[0], dtype=torch.int64, device=dy.device)
    torch_npu.npu_grouped_matmul_add_(buffer.unsqueeze(0), dy, x, group_end, transpose_x=True)
    return buffer
