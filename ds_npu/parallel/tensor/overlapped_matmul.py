"""Matrix products of Megatron sequence parallelism that overlap with their collective: pipelined, or in one kernel.

Shape letters: B batch, S sequence, s = S / ranks (a shard), K inner and N outer dimension of a matrix [K, N], P ranks,
b and c: batch entries and rows of a shard in one piece. The caller computes gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist

from ds_npu.comm.collectives import all_gather, gather_parts, scatter_parts
from ds_npu.comm.communicator import communicator
from ds_npu.comm.pending import Pending, Works
from ds_npu.ops.operator import npu_kernels
from ds_npu.parallel.tensor.axis import Pair, sum_of_products, unflatten_rows
from ds_npu.parallel.tensor.overlap_cost import are_samples


@dataclass(frozen=True)
class Piece:
    """The entries and rows of every rank's shard [B, s, ...] that are sent and multiplied as one."""

    entries: slice
    rows: slice

    def shard(self, x_BsK: torch.Tensor) -> torch.Tensor:
        """The piece of one shard, [b, c, K]."""
        return x_BsK[self.entries, self.rows]

    def parts(self, x_BSK: torch.Tensor, ranks: int) -> torch.Tensor:
        """The piece of every rank's shard of the whole sequence, stacked: [P, b, c, K], a view."""
        by_rank = torch.unflatten(x_BSK, 1, (ranks, -1))
        return by_rank[self.entries, :, self.rows].movedim(1, 0)


ALL = Piece(slice(None), slice(None))


def shard_pieces(batch: int, rows: int, count: int) -> list[Piece]:
    """About ``count`` pieces of a shard [batch, rows]: its rows divided evenly, or its entries one by one.

    One entry of the batch is contiguous in the whole sequence, so nothing is copied; a piece of the rows is not, but
    there may be any number of them. So the pieces are entries where the batch has about ``count`` of them.
    """
    if are_samples(batch, count):
        return [Piece(slice(entry, entry + 1), slice(0, rows)) for entry in range(batch)]
    count = max(1, min(count, rows))
    bounds = [index * rows // count for index in range(count + 1)]
    return [Piece(slice(0, batch), slice(start, stop)) for start, stop in pairwise(bounds)]


@dataclass(frozen=True)
class Pipelined:
    """Overlap in pieces: one is sent while another is multiplied (MindSpeed's CoC).

    It sends as many bytes as one collective. Every element is the sum of the same products as without pieces, but the
    matrix library and the collective may sum in another order for smaller shapes: equal to rounding, not bitwise. The
    gathered tensor is equal bitwise.
    """

    group: dist.ProcessGroup | None
    pieces: int
    """The largest number of pieces."""

    def gather_matmul(
        self, x_shard: torch.Tensor, matrices: Sequence[torch.Tensor], gathered: bool = True
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        ranks = dist.get_world_size(self.group)
        batch, rows, inner = x_shard.shape
        pieces = shard_pieces(batch, rows, self.pieces)
        if len(pieces) == 1:
            whole = all_gather(x_shard, 1, self.group).wait()
            return whole, [torch.matmul(whole, matrix) for matrix in matrices]
        whole = x_shard.new_empty((batch, ranks * rows, inner) if gathered else 0)
        products = [x_shard.new_empty(batch, ranks * rows, matrix.shape[1]) for matrix in matrices]
        targets = [piece.parts(whole, ranks) if gathered else None for piece in pieces]
        pending = self._gather(x_shard, pieces[0], targets[0])
        for index, (piece, target) in enumerate(zip(pieces, targets, strict=True), start=1):
            parts = pending.wait()
            if index < len(pieces):
                pending = self._gather(x_shard, pieces[index], targets[index])
            for matrix, product in zip(matrices, products, strict=True):
                _multiply_into(piece.parts(product, ranks), parts, matrix)
            if target is not None and target is not parts:
                target.copy_(parts)
        return whole, products

    def matmul_scatter(self, pairs: Sequence[Pair]) -> Pending[torch.Tensor]:
        """As ``MatmulCollectives``. Raises ValueError where the ranks do not divide the sequence."""
        ranks = dist.get_world_size(self.group)
        (x, matrix), *_ = pairs
        batch, sequence = x.shape[:2]
        _check_divides(x, ranks)
        out = x.new_empty(batch, sequence // ranks, matrix.shape[1])
        pending = [
            self._scatter(sum_of_products([(piece.parts(x, ranks), matrix) for x, matrix in pairs]), piece.shard(out))
            for piece in shard_pieces(batch, sequence // ranks, self.pieces)
        ]
        return Pending(out, Works(pending))

    def _gather(self, x_BsK: torch.Tensor, piece: Piece, target: torch.Tensor | None) -> Pending[torch.Tensor]:
        shard = piece.shard(x_BsK)
        if target is None or not target.is_contiguous():
            target = shard.new_empty(dist.get_world_size(self.group), *shard.shape)
        return gather_parts(target, shard, self.group)

    def _scatter(self, parts_PbcN: torch.Tensor, out_bcN: torch.Tensor) -> Pending[torch.Tensor]:
        if out_bcN.is_contiguous():
            return scatter_parts(out_bcN, parts_PbcN, self.group)
        mine = parts_PbcN.new_empty(parts_PbcN.shape[1:])
        return Pending(mine, scatter_parts(mine, parts_PbcN, self.group), out_bcN.copy_)


def _check_divides(x_BSK: torch.Tensor, ranks: int) -> None:
    if x_BSK.shape[1] % ranks:
        raise ValueError(f"dim 1 of {tuple(x_BSK.shape)}, the sequence, does not divide by the group's {ranks} ranks")


def _multiply_into(out_PbcN: torch.Tensor, parts_PbcK: torch.Tensor, matrix: torch.Tensor) -> None:
    """Write one product for all ranks' parts into ``out_PbcN``: without a copy where that is contiguous."""
    x_MK = parts_PbcK.flatten(0, -2)
    if out_PbcN.is_contiguous():
        torch.mm(x_MK, matrix, out=out_PbcN.flatten(0, -2))
    else:
        out_PbcN.copy_(torch.mm(x_MK, matrix).view(out_PbcN.shape))


class FusedKernels(Protocol):
    """``ds_npu.ops.npu.matmul_collective``, which can be imported only where torch_npu can."""

    def all_gather_matmul(
        self, x_MK: torch.Tensor, matrix_KN: torch.Tensor, communicator: str, ranks: int, gathered: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def matmul_reduce_scatter(
        self, x_MK: torch.Tensor, matrix_KN: torch.Tensor, communicator: str, ranks: int
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Fused:
    """Overlap in one kernel of torch_npu (MC2), of operands that it takes (``matmul_collective.unmet``).

    On an A2 all fused kernels of a process must use one group (op-plugin's documentation): make one object a process.
    """

    group: dist.ProcessGroup

    def gather_matmul(
        self, x_shard: torch.Tensor, matrices: Sequence[torch.Tensor], gathered: bool = True
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Pipelined's ``gather_matmul``; of several matrices the widest is fused, the others are multiplied later."""
        # Its product takes longest, and so hides most of the collective.
        fused = max(matrices, key=lambda matrix: matrix.shape[1])
        product, rows = self._kernels.all_gather_matmul(
            x_shard.flatten(0, 1).contiguous(),
            fused,
            communicator(self.group),
            self._ranks,
            gathered or len(matrices) > 1,
        )
        whole = self._along_sequence(rows, x_shard.shape[0]) if rows.numel() else rows
        fused_BSN = self._along_sequence(product, x_shard.shape[0])
        return whole, [fused_BSN if matrix is fused else torch.matmul(whole, matrix) for matrix in matrices]

    def matmul_scatter(self, pairs: Sequence[Pair]) -> Pending[torch.Tensor]:
        """Pipelined's ``matmul_scatter``, of one pair; queued on the current stream, so waiting does nothing."""
        ((x, matrix),) = pairs
        batch, sequence = x.shape[:2]
        _check_divides(x, self._ranks)
        by_rank = ALL.parts(x, self._ranks).flatten(0, -2).contiguous()
        out = self._kernels.matmul_reduce_scatter(by_rank, matrix, communicator(self.group), self._ranks)
        return Pending(unflatten_rows(out, (batch, sequence // self._ranks)), None)

    @functools.cached_property
    def _ranks(self) -> int:
        return dist.get_world_size(self.group)

    @functools.cached_property
    def _kernels(self) -> FusedKernels:
        kernels: FusedKernels = npu_kernels("ds_npu.ops.npu.matmul_collective")
        return kernels

    def _along_sequence(self, rows_MN: torch.Tensor, batch: int) -> torch.Tensor:
        """[P * B * s, N], rank after rank, as [B, S, N]: a view for a batch of one, else a copy."""
        by_rank = torch.unflatten(rows_MN, 0, (self._ranks, batch, -1))
        return by_rank.movedim(1, 0).flatten(1, 2)
