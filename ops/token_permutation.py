"""Rows of tokens copied into the order of what they are sent to (experts, ranks), and their sums brought back."""

from __future__ import annotations

import torch
from torch.nn import functional

from ds_npu.operator_costs import token_permute_cost, token_unpermute_cost
from ds_npu.ops.operator import Operator


@torch.no_grad()
def permute_reference(x_NH: torch.Tensor, ids_NK: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy token n once for each of its ``ids``, all copies in the order of the ids; no gradient is recorded.

    x: [N, H]; ids: [N, K] int64; equal ids keep the order of [N, K]. Copies beyond ``rows`` are dropped: those of the
    largest ids. Returns ([rows, H], places [N * K] int32: where each copy went, or would have gone).
    Source: the permutation of Megatron-LM's grouped MoE and of torch_npu.npu_moe_token_permute.
    """
    order = torch.argsort(ids_NK.reshape(-1), stable=True)
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    return x_NH.index_select(0, order[:rows] // ids_NK.shape[1]), places


@torch.no_grad()
def unpermute_reference(rows_PH: torch.Tensor, places_NK: torch.Tensor) -> torch.Tensor:
    """The sum of the rows at each token's ``places``, in their order; no gradient is recorded.

    rows: [P, H]; places: [N, K] int32, of which those >= P count as zeros. Returns [N, H]; sums are in the dtype of
    the rows, in float32 for lower ones.
    """
    if not len(rows_PH) or not len(places_NK):
        return rows_PH.new_zeros(len(places_NK), rows_PH.shape[1])
    wide = rows_PH.to(torch.promote_types(rows_PH.dtype, torch.float32))
    places_NK = places_NK.long()
    kept_NK = (places_NK < len(rows_PH)).to(wide.dtype)
    chosen = places_NK.clamp(max=len(rows_PH) - 1)
    # The fastest sum of rows that PyTorch has on a CPU.
    return functional.embedding_bag(chosen, wide, mode="sum", per_sample_weights=kept_NK).to(rows_PH.dtype)


def permute_sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Arguments for the self-check."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 32, generator=generator).to(dtype)
    return x, torch.rand(6, 5, generator=generator).argsort(1)[:, :2], 9


def unpermute_sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments for the self-check."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(9, 32, generator=generator).to(dtype)
    return rows, torch.randperm(12, generator=generator).view(6, 2).int()


token_permute = Operator(
    "token_permute",
    permute_reference,
    kernel="ds_npu.ops.npu.token_permutation:token_permute",
    needs=("npu_moe_token_permute",),
    sample=permute_sample,
    cost=token_permute_cost,
)
token_unpermute = Operator(
    "token_unpermute",
    unpermute_reference,
    kernel="ds_npu.ops.npu.token_permutation:token_unpermute",
    needs=("npu_moe_token_unpermute",),
    sample=unpermute_sample,
    cost=token_unpermute_cost,
)
