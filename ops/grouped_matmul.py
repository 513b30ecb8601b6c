"""Products of consecutive groups of rows, each with its own matrix: all experts of a rank at once."""

from __future__ import annotations

import torch

from ds_npu.operator_costs import grouped_matmul_cost, grouped_outer_accumulate_cost, grouped_outer_cost
from ds_npu.ops.operator import Operator, sample_numbers


@torch.no_grad()
def reference(x_PK: torch.Tensor, weight_EKN: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """Rows of group e times ``weight[e]``; no gradient is recorded.

    x: [P, K]; weight: [E, K, N], of the same dtype, also a transposed view; counts: [E] int64, the rows of each group,
    P in all. Returns [P, N]. On the CPU one product for each group that has rows.
    """
    out = x_PK.new_empty(len(x_PK), weight_EKN.shape[2])
    counts = counts_E.tolist()
    for rows, weight, result in zip(torch.split(x_PK, counts), weight_EKN, torch.split(out, counts), strict=True):
        if len(rows):
            torch.mm(rows, weight, out=result)
    return out


@torch.no_grad()
def outer_reference(a_PM: torch.Tensor, b_PN: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """aᵀ b of each group of rows: the weight gradients of all groups; zeros for a group without rows.

    a: [P, M]; b: [P, N], of one dtype; counts: [E] int64, P in all. Returns [E, M, N] in that dtype.
    """
    counts = counts_E.tolist()
    out = a_PM.new_empty(len(counts), a_PM.shape[1], b_PN.shape[1])
    for a, b, result in zip(torch.split(a_PM, counts), torch.split(b_PN, counts), out, strict=True):
        if len(a):
            torch.mm(a.t(), b, out=result)
        else:
            result.zero_()
    return out


@torch.no_grad()
def outer_accumulate_reference(
    buffer_EMN: torch.Tensor, a_PM: torch.Tensor, b_PN: torch.Tensor, counts_E: torch.Tensor
) -> torch.Tensor:
    """buffer += aᵀ b of each group of rows, in place, and the buffer is returned; no gradient is recorded.

    buffer: [E, M, N], float32 or float64; a: [P, M]; b: [P, N], of one dtype, usually a lower one; counts: [E] int64,
    P in all. The sums over rows are in the buffer's dtype.
    """
    counts = counts_E.tolist()
    for a, b, result in zip(torch.split(a_PM, counts), torch.split(b_PN, counts), buffer_EMN, strict=True):
        if len(a):
            result.addmm_(a.to(buffer_EMN.dtype).t(), b.to(buffer_EMN.dtype))
    return buffer_EMN


SAMPLE_COUNTS = (3, 0, 5)


def sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weight = sample_numbers(dtype, (sum(SAMPLE_COUNTS), 32), (len(SAMPLE_COUNTS), 16, 32))
    return x, weight.transpose(1, 2), torch.tensor(SAMPLE_COUNTS)


def outer_sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b = sample_numbers(dtype, (sum(SAMPLE_COUNTS), 16), (sum(SAMPLE_COUNTS), 32))
    return a, b, torch.tensor(SAMPLE_COUNTS)


def accumulate_sample(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    a, b, counts = outer_sample(dtype)
    (buffer,) = sample_numbers(torch.float32, (len(SAMPLE_COUNTS), 16, 32))
    return buffer, a, b, counts


grouped_matmul = Operator(
    "grouped_matmul",
    reference,
    kernel="ds_npu.ops.npu.experts:grouped_matmul",
    needs=("npu_grouped_matmul",),
    sample=sample,
    cost=grouped_matmul_cost,
)
grouped_outer = Operator(
    "grouped_outer",
    outer_reference,
    kernel="ds_npu.ops.npu.experts:grouped_outer",
    needs=("npu_grouped_matmul",),
    sample=outer_sample,
    cost=grouped_outer_cost,
)
grouped_outer_accumulate_ = Operator(
    "grouped_outer_accumulate",
    outer_accumulate_reference,
    kernel="ds_npu.ops.npu.experts:grouped_outer_accumulate_",
    needs=("npu_grouped_matmul_add_",),
    sample=accumulate_sample,
    cost=grouped_outer_accumulate_cost,
)
