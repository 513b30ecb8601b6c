"""Matrix products fused with a collective (MC2): torch_npu's kernels, which find their communicator by its name.

The name of a process group's communicator: ``ds_npu.comm.communicator.communicator``. Shape letters of the products of
experts: S rows that this rank sends, by expert of all ranks; P rows that it gets, by its own experts; E its experts, R
ranks. ``sent`` and ``received``: [R * E] rows to or from each rank, of each expert of the receiver.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch_npu


def all_gather_matmul(
    x_MK: torch.Tensor, matrix_KN: torch.Tensor, communicator: str, ranks: int, gathered: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank's ``x``, concatenated, times this rank's ``matrix``: ([ranks * M, N], [ranks * M, K]).

    The second is the gathered ``x``, empty where ``gathered`` is false. ``x`` is contiguous, ``matrix`` may be a
    transposed view; see ``ds_npu.ops.matmul_collective.unmet`` for what else must hold. Source: aclnnAllGatherMatmul.
    """
    product, whole = torch_npu.npu_all_gather_base_mm(
        x_MK, matrix_KN, communicator, ranks, bias=None, gather_index=0, gather_output=gathered, comm_turn=0
    )
    return product, whole


def matmul_reduce_scatter(x_MK: torch.Tensor, matrix_KN: torch.Tensor, communicator: str, ranks: int) -> torch.Tensor:
    """The sum of every rank's ``x`` times its ``matrix``; this rank's M / ranks rows of it, [M / ranks, N].

    Each rank's product is rounded before it is added. Operands as in ``all_gather_matmul``. Source:
    aclnnMatmulReduceScatter.
    """
    out: torch.Tensor = torch_npu.npu_mm_reduce_scatter_base(
        x_MK, matrix_KN, communicator, ranks, reduce_op="sum", bias=None, comm_turn=0
    )
    return out


def alltoall_matmul(
    x_SK: torch.Tensor,
    weight_EKN: torch.Tensor,
    communicator: str,
    sent: Sequence[int],
    received: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that this rank gets, times the matrix of their expert, [P, N], and the rows themselves, [P, K].

    See ``ds_npu.ops.expert_exchange`` for what must hold. Source: aclnnAlltoAllvGroupedMatMul.
    """
    weight, transposed = _stored(weight_EKN)
    y, _, rows = torch_npu.npu_alltoallv_gmm(
        x_SK.contiguous(),
        weight,
        communicator,
        len(sent) // len(weight),
        list(sent),
        list(received),
        trans_gmm_weight=transposed,
        permute_out_flag=True,
    )
    return y, rows


def matmul_alltoall(
    x_PK: torch.Tensor,
    weight_EKN: torch.Tensor,
    communicator: str,
    sent: Sequence[int],
    received: Sequence[int],
) -> torch.Tensor:
    """Rows of this rank's experts times their matrix, back at the ranks that they came from: [S, N].

    ``sent`` and ``received`` as in ``alltoall_matmul``, which brought the rows. Source: aclnnGroupedMatMulAlltoAllv.
    """
    weight, transposed = _stored(weight_EKN)
    y: torch.Tensor = torch_npu.npu_gmm_alltoallv(
        x_PK.contiguous(),
        weight,
        communicator,
        len(sent) // len(weight),
        list(received),
        list(sent),
        trans_gmm_weight=transposed,
    )[0]
    return y


def _stored(weight: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The contiguous matrices that ``weight`` is a view of, and whether they are transposed."""
    if weight.is_contiguous() or not weight.transpose(1, 2).is_contiguous():
        return weight.contiguous(), False
    return weight.transpose(1, 2), True
