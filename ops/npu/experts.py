"""Kernels of torch_npu for experts: grouped products, one kernel for all groups, and the permutation of tokens.

CANN's operators: aclnnGroupedMatmulV4/V5, aclnnGroupedMatmulAdd, aclnnMoeTokenPermute and aclnnMoeTokenUnpermute.
"""

from __future__ import annotations

import torch
import torch_npu

from ds_npu.ops import grouped_matmul as operators
from ds_npu.ops import matmul_accumulate

SPLIT_ROWS, SPLIT_INNER = 0, 2
"""Values of ``group_type``: groups of rows of x, and groups along the dim that is summed over."""
ONE_RESULT = 3
"""A value of ``split_item``."""
COUNTS = 1
"""A value of ``group_list_type``: the sizes of the groups, not their ends."""


@torch.no_grad()
def grouped_matmul(x_PK: torch.Tensor, weight_EKN: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    return _product(x_PK, weight_EKN, counts_E, SPLIT_ROWS)


@torch.no_grad()
def grouped_outer(a_PM: torch.Tensor, b_PN: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    return _product(a_PM.t(), b_PN, counts_E, SPLIT_INNER)


@torch.no_grad()
def grouped_outer_accumulate_(
    buffer_EMN: torch.Tensor, a_PM: torch.Tensor, b_PN: torch.Tensor, counts_E: torch.Tensor
) -> torch.Tensor:
    """``ds_npu.ops.grouped_outer_accumulate``: bf16 and fp16 only, as the kernel (aclnnGroupedMatmulAdd)."""
    if a_PM.dtype not in (torch.bfloat16, torch.float16) or not buffer_EMN.is_contiguous() or not len(a_PM):
        return operators.outer_accumulate_reference(buffer_EMN, a_PM, b_PN, counts_E)
    torch_npu.npu_grouped_matmul_add_(buffer_EMN, a_PM, b_PN, counts_E.cumsum(0), transpose_x=True)
    return buffer_EMN


def _product(x: torch.Tensor, weight: torch.Tensor, counts_E: torch.Tensor, group_type: int) -> torch.Tensor:
    y: torch.Tensor = torch_npu.npu_grouped_matmul(
        [x], [weight], group_list=counts_E, split_item=ONE_RESULT, group_type=group_type, group_list_type=COUNTS
    )[0]
    return y


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
        return matmul_accumulate.reference(buffer, dy, x)
    # The device fills it: nothing is copied from the host, so it does not wait.
    group_end = torch.full((1,), dy.shape[0], dtype=torch.int64, device=dy.device)
    torch_npu.npu_grouped_matmul_add_(buffer.unsqueeze(0), dy, x, group_end, transpose_x=True)
    return buffer


@torch.no_grad()
def token_permute(x_NH: torch.Tensor, ids_NK: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    if rows == 0 or len(x_NH) == 0:
        # The kernel takes 0 for all rows.
        order = torch.argsort(ids_NK.reshape(-1), stable=True)
        return x_NH.new_empty(0, x_NH.shape[1]), torch.argsort(order).int()
    permuted, positions = torch_npu.npu_moe_token_permute(x_NH, ids_NK, rows)
    return permuted, positions


@torch.no_grad()
def token_unpermute(rows_PH: torch.Tensor, positions_NK: torch.Tensor) -> torch.Tensor:
    """``ds_npu.ops.token_unpermute``; the kernel sums several rows of a token only with a factor for each."""
    if positions_NK.numel() == 0 or len(rows_PH) == 0:
        return rows_PH.new_zeros(len(positions_NK), rows_PH.shape[1])
    if len(rows_PH) < positions_NK.numel():
        factors = torch.ones_like(positions_NK, dtype=rows_PH.dtype)
    else:
        # The kernel skips positions behind the last row only where there are fewer rows than positions.
        factors = (positions_NK < len(rows_PH)).to(rows_PH.dtype)
        positions_NK = positions_NK.clamp(max=len(rows_PH) - 1)
    y: torch.Tensor = torch_npu.npu_moe_token_unpermute(rows_PH, positions_NK.reshape(-1), factors)
    return y
