"""Gather matrices whose pieces lie on several ranks at their owners, orthogonalise them, and return the updates.

Pieces of the next wave travel while the matrices of this one are iterated, and updates of this one while the next are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_npu.comm.collectives import exchange_rows
from ds_npu.comm.pending import Pending
from ds_npu.parallel.whole_matrices.pieces import Matrix, MatrixPiece
from ds_npu.parallel.whole_matrices.plan import PieceMessage, SlottedPiece, Wave

Iteration = Callable[[Matrix, torch.Tensor], torch.Tensor]
"""Orthogonalises matrices of one shape, from the first Matrix and the values of all [matrices, rows, columns]."""


@dataclass(frozen=True)
class MatrixExchange:
    """The exchange of one portion's matrices, as this rank takes part in it."""

    waves: Sequence[Wave]
    group: dist.ProcessGroup | None
    """The ranks, as the plan numbers them."""

    @torch.no_grad()
    def orthogonalise(
        self, flats: Sequence[torch.Tensor], like: torch.Tensor, iteration: Iteration, dtype: torch.dtype
    ) -> None:
        """Replace gradients by updates in ``flats``, this rank's flat tensors; all ranks of the group call it.

        ``like``: an empty tensor of the dtype in which gradients travel, on the device; ``dtype``: of the results of
        ``iteration``, in which updates travel.
        """
        pending = self._send(0, flats, like)
        returning = None
        for index, wave in enumerate(self.waves):
            assert pending is not None, "each wave is sent before it is iterated"
            gradients = pending.wait()
            pending = self._send(index + 1, flats, like)
            updates = self._iterated(wave, gradients, iteration, dtype)
            if returning is not None:
                _write(flats, self.waves[index - 1].updated.pieces, returning.wait())
            returning = self._exchange(wave, updates, wave.returned, wave.updated)
        if returning is not None:
            _write(flats, self.waves[-1].updated.pieces, returning.wait())

    def _send(self, index: int, flats: Sequence[torch.Tensor], like: torch.Tensor) -> Pending[torch.Tensor] | None:
        if index >= len(self.waves):
            return None
        wave = self.waves[index]
        parts = [_part(flats, each) for _, each in wave.sent.pieces]
        sent = torch.cat(parts).to(like) if parts else like
        return self._exchange(wave, sent, wave.sent, wave.received)

    def _exchange(
        self, wave: Wave, x: torch.Tensor, sent: PieceMessage, received: PieceMessage
    ) -> Pending[torch.Tensor]:
        if not wave.is_sent:
            return Pending(x, None)
        return exchange_rows(x, sent.counts, received.counts, self.group)

    def _iterated(self, wave: Wave, gradients: torch.Tensor, iteration: Iteration, dtype: torch.dtype) -> torch.Tensor:
        """Orthogonalise this rank's matrices; return the updates of their pieces, in the order of sending."""
        batches = [list(each) for _, each in itertools.groupby(wave.matrices, key=lambda each: each.form)]
        stacks = [gradients.new_empty(len(batch), batch[0].rows, batch[0].columns) for batch in batches]
        for inside, part in _tiles_of(_each_of(stacks), wave.received.pieces, gradients):
            inside.copy_(part)
        found = [iteration(batch[0], stack) for batch, stack in zip(batches, stacks, strict=True)]
        updates = gradients.new_empty(sum(wave.returned.counts), dtype=dtype)
        for inside, part in _tiles_of(_each_of(found), wave.returned.pieces, updates):
            part.copy_(inside)
        return updates


def _each_of(stacks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [matrix for stack in stacks for matrix in stack]


def _tiles_of(
    wholes: Sequence[torch.Tensor], pieces: Sequence[SlottedPiece], flat: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield views of each tile of ``pieces``: in its matrix, and in ``flat``, which concatenates the pieces."""
    for (slot, piece), values in zip(pieces, _split(flat, pieces), strict=True):
        for tile in piece.tiles:
            strip = values[tile.start : tile.start + tile.rows * tile.width].view(tile.rows, tile.width)
            inside = wholes[slot][tile.row : tile.row + tile.rows, tile.column : tile.column + tile.columns]
            yield inside, strip[:, tile.column_in_piece : tile.column_in_piece + tile.columns]


def _split(flat: torch.Tensor, pieces: Sequence[SlottedPiece]) -> Sequence[torch.Tensor]:
    return torch.split(flat, [piece.numel for _, piece in pieces]) if pieces else ()


def _write(flats: Sequence[torch.Tensor], pieces: Sequence[SlottedPiece], updates: torch.Tensor) -> None:
    for (_, piece), values in zip(pieces, _split(updates, pieces), strict=True):
        _part(flats, piece).copy_(values)


def _part(flats: Sequence[torch.Tensor], piece: MatrixPiece) -> torch.Tensor:
    return flats[piece.tensor][piece.start : piece.start + piece.numel]
