"""Copies of tokens in the order of their destinations (experts, ranks), and the sums of each token's rows."""

from __future__ import annotations

import torch
from torch.nn import functional

from ds_npu.operator_costs import token_permute_cost, token_unpermute_cost
from ds_npu.ops.operator import Operator


@torch.no_grad()
def permute_reference(x_NH: torch.Tensor, ids_NK: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy token n once for each of its ``ids``, all copies in the order of the ids; no gradient is recorded.

    x: [N, H]; ids: [N, K] int64; equal ids keep the order of [N, K]. Copies beyond ``rows``, of the largest ids, are
    dropped. Returns ([rows, H], positions [N * K] int32: where each copy went, or would have gone).
    Source: the permutation of Megatron-LM's grouped MoE and of torch_npu.npu_moe_token_permute.
    """
    order = torch.argsort(ids_NK.reshape(-1), stable=True)
    positions = torch.empty_like(order, dtype=torch.int32)
    positions[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    return x_NH.index_select(0, order[:rows] // ids_NK.shape[1]), positions


@torch.no_grad()
def unpermute_reference(rows_PH: torch.Tensor, positions_NK: torch.Tensor) -> torch.Tensor:
    """The sum of the rows at each token's ``positions``, in their order; no gradient is recorded.

    rows: [P, H]; positions: [N, K] int32; a position >= P adds zeros. Returns [N, H]; sums are in the dtype of the
    rows, in float32 for lower ones.
    """
    if not len(rows_PH) or not len(positions_NK):
        return rows_PH.new_zeros(len(positions_NK), rows_PH.shape[1])
    wide = rows_PH.to(torch.promote_types(rows_PH.dtype, torch.float32))
    positions_NK = positions_NK.long()
    kept_NK = (positions_NK < len(rows_PH)).to(wide.dtype)
    chosen = positions_NK.clamp(max=len(rows_PH) - 1)
    # The fastest sum of rows that PyTorch has on a CPU.
    return functional.embedding_bag(chosen, wide, mode="sum", per_sample_weights=kept_NK).to(rows_PH.dtype)


def permute_sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 32, generator=generator).to(dtype)
    return x, torch.rand(6, 5, generator=generator).argsort(1)[:, :2], 9


def unpermute_sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(9, 32, generator=generator).to(dtype)
    return rows, torch.randperm(12, generator=generator).view(6, 2).int()


token_permute = Operator(
    "token_permute",
    permute_reference,
    kernel="ds_npu.ops.npu.experts:token_permute",
    needs=("npu_moe_token_permute",),
    sample=permute_sample,
    cost=token_permute_cost,
)
token_unpermute = Operator(
    "token_unpermute",
    unpermute_reference,
    kernel="ds_npu.ops.npu.experts:token_unpermute",
    needs=("npu_moe_token_unpermute",),
    sample=unpermute_sample,
    cost=token_unpermute_cost,
)
