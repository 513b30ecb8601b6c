"""Permutation of tokens with torch_npu (aclnnMoeTokenPermute, aclnnMoeTokenUnpermute)."""

from __future__ import annotations

import torch
import torch_npu


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
