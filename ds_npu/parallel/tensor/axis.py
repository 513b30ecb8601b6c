"""The tensor axis as its layers see it, and the products of matrices that cross it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ds_npu.comm.collectives import all_gather, reduce_scatter
from ds_npu.comm.pending import Pending
from ds_npu.topology.topology import Topology

SEQUENCE_DIM = 1
"""Of hidden states, [B, S, H]."""


class MatmulCollectives(Protocol):
    """Products of matrices with the collectives of sequence parallelism. Matrices are [K, N]."""

    def gather_matmul(
        self, x_BsK: torch.Tensor, matrices: Sequence[torch.Tensor], gathered: bool = True
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """All-gather [B, S / tp, K] along the sequence; returns [B, S, K] and its product with each matrix.

        The first may be empty where ``gathered`` is false.
        """
        ...

    def matmul_scatter(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Pending[torch.Tensor]:
        """The sum of the products of [B, S, K_i] and [K_i, N], reduce-scattered: [B, S / tp, N], still in flight."""
        ...


def total(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The sum of the products of [B, S, K_i] and [K_i, N], in one buffer [B, S, N]."""
    x, matrix = pairs[0]
    out = torch.mm(x.flatten(0, -2), matrix)
    for x, matrix in pairs[1:]:
        out.addmm_(x.flatten(0, -2), matrix)
    return out.view(*pairs[0][0].shape[:-1], -1)


@dataclass(frozen=True)
class OneAfterTheOther:
    """One collective, then one product, or the other way round."""

    group: Any

    def gather_matmul(
        self, x_BsK: torch.Tensor, matrices: Sequence[torch.Tensor], gathered: bool = True
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x = all_gather(x_BsK, SEQUENCE_DIM, self.group).wait()
        return x, [torch.matmul(x, matrix) for matrix in matrices]

    def matmul_scatter(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Pending[torch.Tensor]:
        return reduce_scatter(total(pairs), SEQUENCE_DIM, self.group)


@dataclass(frozen=True)
class TensorAxis:
    """What a layer needs to know of the tensor ranks."""

    group: Any
    size: int
    rank: int
    sequence_parallel: bool
    """Whether hidden states outside of regions are shards [B, S / tp, H], and not the same on every rank."""
    collectives: MatmulCollectives


def tensor_axis(
    topology: Topology, sequence_parallel: bool = False, collectives: MatmulCollectives | None = None
) -> TensorAxis:
    """The tensor axis of ``topology``; with one rank nothing is sharded."""
    group, size = topology.group("tp"), topology.size("tp")
    products = collectives or OneAfterTheOther(group)
    return TensorAxis(group, size, topology.rank("tp"), sequence_parallel and size > 1, products)
