"""Calls of the operators of experts: grouped products, and permutations of tokens to their experts and back.

Names of shapes: T tokens, K experts of each, E experts, H hidden, I columns of an expert, P = T * K rows.
"""

from __future__ import annotations

import torch

from ds_npu.acceptance.operator_call import Arguments, Call, drawn, maker
from ds_npu.ops.grouped_matmul import grouped_matmul, grouped_outer, grouped_outer_accumulate_
from ds_npu.ops.token_permutation import token_permute, token_unpermute


def group_sizes(groups: int, rows: int) -> torch.Tensor:
    """[groups] int64 that add up to ``rows``; one group of three has none."""
    shares = torch.rand(groups, generator=torch.Generator().manual_seed(5))
    shares[1::3] = 0
    sizes = (shares / shares.sum() * rows).long()
    sizes[0] += rows - sizes.sum()
    return sizes


@maker
def grouped_args(dtype: torch.dtype, groups: int, rows: int, inner: int, columns: int, transposed: bool) -> Arguments:
    """x [rows, inner], weight [groups, inner, columns] (``transposed``: a view of the other order), sizes."""
    order = (columns, inner) if transposed else (inner, columns)
    weight = drawn(groups, *order, seed=2, dtype=dtype, gradient=False)
    x = drawn(rows, inner, seed=1, dtype=dtype, gradient=False)
    return x, weight.transpose(1, 2) if transposed else weight, group_sizes(groups, rows)


@maker
def outer_args(dtype: torch.dtype, groups: int, rows: int, left: int, right: int) -> Arguments:
    """a [rows, left], b [rows, right], sizes."""
    return (
        drawn(rows, left, seed=1, dtype=dtype, gradient=False),
        drawn(rows, right, seed=2, dtype=dtype, gradient=False),
        group_sizes(groups, rows),
    )


@maker
def outer_accumulate_args(dtype: torch.dtype, groups: int, rows: int, left: int, right: int) -> Arguments:
    """buffer [groups, left, right] float32, then the arguments of ``outer_args``."""
    return (
        drawn(groups, left, right, seed=3, dtype=torch.promote_types(dtype, torch.float32), gradient=False),
        *outer_args(groups, rows, left, right)(dtype),
    )


@maker
def permute_args(
    dtype: torch.dtype, tokens: int, choices: int, experts: int, hidden: int, kept: float = 1.0
) -> Arguments:
    """x [T, H], experts [T, K], and the number of rows: the share ``kept`` of the T * K copies of tokens."""
    ids = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(2)).argsort(1)[:, :choices]
    return drawn(tokens, hidden, seed=1, dtype=dtype, gradient=False), ids, int(kept * tokens * choices)


@maker
def unpermute_args(dtype: torch.dtype, tokens: int, choices: int, hidden: int, kept: float = 1.0) -> Arguments:
    """rows [P, H] and positions [T, K]; P of the positions are those of a row, the others were dropped."""
    positions = torch.randperm(tokens * choices, generator=torch.Generator().manual_seed(3)).int()
    rows = drawn(int(kept * tokens * choices), hidden, seed=1, dtype=dtype, gradient=False)
    return rows, positions.view(tokens, choices)


SMALL_EXPERTS = (
    Call("products of experts", grouped_matmul, grouped_args(5, 37, 32, 48, transposed=False)),
    Call("products of experts, transposed", grouped_matmul, grouped_args(4, 33, 48, 16, transposed=True)),
    Call("weight gradients of experts", grouped_outer, outer_args(5, 37, 24, 40)),
    Call("weight gradients of experts, added", grouped_outer_accumulate_, outer_accumulate_args(4, 37, 24, 40)),
    Call("tokens to experts", token_permute, permute_args(19, 3, 6, 32)),
    Call("tokens to experts, some dropped", token_permute, permute_args(19, 3, 6, 32, kept=0.6)),
    Call("tokens from experts", token_unpermute, unpermute_args(19, 3, 32)),
    Call("tokens from experts, some dropped", token_unpermute, unpermute_args(19, 3, 32, kept=0.6)),
)
LARGE_EXPERTS = (
    Call("products of 128 experts 2048 x 192", grouped_matmul, grouped_args(128, 8192, 2048, 192, True)),
    Call("products of 2 experts 4096 x 14336", grouped_matmul, grouped_args(2, 512, 4096, 14336, True)),
    Call("weight gradients of 64 experts 192 x 2048", grouped_outer, outer_args(64, 4096, 192, 2048)),
    Call(
        "weight gradients of 8 experts 1408 x 2048, added",
        grouped_outer_accumulate_,
        outer_accumulate_args(8, 4096, 1408, 2048),
    ),
    Call("tokens to 128 experts 4096 x 2048, 8 each", token_permute, permute_args(4096, 8, 128, 2048)),
    Call("tokens from experts 4095 x 2048, 8 each", token_unpermute, unpermute_args(4095, 8, 2048, kept=0.9)),
)
"""Shapes of Qwen3-30B-A3B over 8 ranks that shard experts, Mixtral 8x7B and DeepSeek-V2-Lite over 4 and 8 expert ranks.

The reference of whole layers in float64 took more than 10 GB and, on two cores, more than LARGE_S.
"""
