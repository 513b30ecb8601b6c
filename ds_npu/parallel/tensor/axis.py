"""The tensor axis as its layers see it, and matrix products with the collectives of sequence parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from ds_npu.comm.collectives import all_gather, reduce_scatter
from ds_npu.comm.pending import Pending
from ds_npu.parallel.tensor.product import WeightLayout
from ds_npu.topology.topology import Topology

Operands = Sequence[torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]
SEQUENCE_DIM = 1
"""The dim of the sequence in hidden states [B, S, H]."""


class MatmulCollectives(Protocol):
    """Matrix products combined with the collectives of sequence parallelism. Matrices are [K, N]."""

    def gather_matmul(
        self, x_BsK: torch.Tensor, matrices: Sequence[torch.Tensor], gathered: bool = True
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """All-gather [B, S / tp, K] along the sequence: returns [B, S, K] and its product with each matrix, [B, S, N].

        Where ``gathered`` is false the first result may be empty.
        """

    def matmul_scatter(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Pending[torch.Tensor]:
        """Reduce-scatter the sum of the products of [B, S, K_i] and [K_i, N]: [B, S / tp, N], to be waited for."""


class ChoosesCollectives(Protocol):
    """Chooses the MatmulCollectives of each call; all tensor ranks choose the same."""

    def of_gather(
        self, x_BsK: torch.Tensor, matrices: Operands, layouts: Sequence[WeightLayout], gathered: bool
    ) -> MatmulCollectives:
        """The choice for a gather of ``x_BsK`` and its products with ``matrices``, whose weights have ``layouts``."""

    def of_scatter(self, pairs: Sequence[Pair], layouts: Sequence[WeightLayout], hides: bool) -> MatmulCollectives:
        """The choice for a scatter of the summed products of ``pairs``.

        ``hides``: before the caller waits, it computes as much, behind which the collective hides.
        """


def sum_of_products(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The sum of the products of [..., K_i] and [K_i, N], in one buffer [..., N]."""
    x, matrix = pairs[0]
    out = torch.mm(x.flatten(0, -2), matrix)
    for x, matrix in pairs[1:]:
        out.addmm_(x.flatten(0, -2), matrix)
    return unflatten_rows(out, pairs[0][0].shape[:-1])


def unflatten_rows(rows_MN: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """[M, N] as [*sizes, N], without a copy and not as a view: it may be the result of an autograd function.

    Autograd refuses to modify a view in place that an autograd function returned; ``torch.matmul`` does the same.
    """
    found: torch.Tensor = torch.ops.aten._unsafe_view(rows_MN, [*sizes, rows_MN.shape[-1]])
    return found


@dataclass(frozen=True)
class SerialCollectives:
    """Collectives and products one after the other, without overlap."""

    group: dist.ProcessGroup | None

    def gather_matmul(
        self, x_BsK: torch.Tensor, matrices: Sequence[torch.Tensor], gathered: bool = True
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x = all_gather(x_BsK, SEQUENCE_DIM, self.group).wait()
        return x, [torch.matmul(x, matrix) for matrix in matrices]

    def matmul_scatter(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Pending[torch.Tensor]:
        return reduce_scatter(sum_of_products(pairs), SEQUENCE_DIM, self.group)


@dataclass(frozen=True)
class Always:
    """The same MatmulCollectives for all calls."""

    collectives: MatmulCollectives

    def of_gather(self, *_: object) -> MatmulCollectives:
        return self.collectives

    def of_scatter(self, *_: object) -> MatmulCollectives:
        return self.collectives


@dataclass(frozen=True)
class TensorAxis:
    """This rank among the tensor ranks, and the layout of hidden states between regions."""

    group: dist.ProcessGroup | None
    size: int
    rank: int
    sequence_parallel: bool
    """Whether hidden states outside of regions are shards [B, S / tp, H], not the same on every rank."""
    collectives: ChoosesCollectives


def tensor_axis(
    topology: Topology,
    sequence_parallel: bool = False,
    collectives: ChoosesCollectives | None = None,
) -> TensorAxis:
    """The tensor axis of ``topology``; with one rank nothing is sharded."""
    group, size = topology.group("tp"), topology.size("tp")
    collectives = collectives or Always(SerialCollectives(group))
    return TensorAxis(group, size, topology.rank("tp"), sequence_parallel and size > 1, collectives)
