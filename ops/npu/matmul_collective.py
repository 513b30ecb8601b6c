"""Matrix products fused with a collective (MC2): torch_npu's kernels, which find their communicator by its name.

The name of a process group's communicator: ``group._get_backend(torch.device("npu")).get_hccl_comm_name(rank)``.
"""

from __future__ import annotations

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
