"""The owner of each matrix, and the messages that bring it together and its update back, in waves.

A plan is computed from what all ranks hold, by every rank alike and without a message; each has its own view of it.
Each matrix has one owner among the ranks that hold a piece of it, so that the world iterates as often as it has
matrices. The owner takes the elements that it does not have from the copy of the weight that it has a part of, and
sends the update to all copies. MindSpeed and Megatron-LM give whole parameters to data ranks, and gather tensor shards
on each tensor rank. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_npu.parallel.whole_matrices.pieces import Matrix, MatrixPiece, WeightHolding, matrices_of, pieces_of

WAVE = 1 << 26
"""Most elements of the matrices that a rank gathers in one wave, unless one matrix has more."""
WAVES, LEAST_WAVE = 4, 1 << 20
"""Waves into which a rank's matrices are divided, since messages hide behind other waves only; but no wave has fewer
elements than LEAST_WAVE, whose message takes longer than the latency of one."""
FLOP_OF_AN_ELEMENT = 25_000.0
"""FLOP that a rank computes while one element arrives and its update leaves: some 6 bytes at 50 GB/s, with
200 TFLOP/s (Atlas 800T A2, as topology/machines.json has it). It only chooses between owners."""

SlottedPiece = tuple[int, MatrixPiece]
"""A piece, and the slot of its matrix among those that its owner iterates in a wave."""


@dataclass(frozen=True)
class PieceMessage:
    """Pieces that one rank sends to all ranks, or receives from all, by rank; ``counts``: elements for each rank."""

    pieces: tuple[SlottedPiece, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Wave:
    """One rank's part of the matrices that are orthogonalised at one time."""

    matrices: tuple[Matrix, ...]
    """The matrices that this rank owns; equal shapes follow each other."""
    sent: PieceMessage
    """Pieces of gradients to the owners."""
    received: PieceMessage
    returned: PieceMessage
    """Pieces of the updates, for all ranks that hold pieces of this rank's matrices."""
    updated: PieceMessage
    is_sent: bool
    """Whether any rank sends something to another; equal on all ranks."""


@dataclass(frozen=True)
class PortionPlan:
    """The plan of the matrices that are stepped in one step of the optimizer, for all ranks."""

    matrices: tuple[Matrix, ...]
    costs: tuple[float, ...]
    owners: tuple[int, ...]
    pieces: tuple[tuple[MatrixPiece, ...], ...]
    """The pieces of each matrix on all ranks."""
    waves: tuple[tuple[int, ...], ...]
    """The matrices of each wave, by index."""
    ranks: int

    def sources(self, matrix: int) -> list[MatrixPiece]:
        """The pieces of which the owner makes the matrix: those of its own copy."""
        owner = self.owners[matrix]
        copy = next(piece.copy for piece in self.pieces[matrix] if piece.rank == owner)
        return [piece for piece in self.pieces[matrix] if piece.copy == copy]

    def sent_elements(self) -> tuple[int, int]:
        """Elements that go to owners, and elements of updates that come back, from one rank to another."""
        there = back = 0
        for matrix, owner in enumerate(self.owners):
            there += sum(piece.numel for piece in self.sources(matrix) if piece.rank != owner)
            back += sum(piece.numel for piece in self.pieces[matrix] if piece.rank != owner)
        return there, back

    def loads(self) -> list[float]:
        """The cost of the matrices that each rank owns."""
        found = [0.0] * self.ranks
        for owner, cost in zip(self.owners, self.costs, strict=True):
            found[owner] += cost
        return found

    def waves_of(self, rank: int) -> tuple[Wave, ...]:
        """The waves as ``rank`` takes part in them."""
        return tuple(self._wave(rank, matrices) for matrices in self.waves)

    def _wave(self, rank: int, matrices: Sequence[int]) -> Wave:
        owned = sorted((each for each in matrices if self.owners[each] == rank), key=self._shape_first)
        slots = {matrix: slot for slot, matrix in enumerate(owned)}
        sources = [piece for matrix in matrices for piece in self.sources(matrix)]
        every = [piece for matrix in matrices for piece in self.pieces[matrix]]
        return Wave(
            tuple(self.matrices[each] for each in owned),
            sent=self._message([piece for piece in sources if piece.rank == rank], slots, to_owners=True),
            received=self._message([piece for piece in sources if piece.matrix in slots], slots, to_owners=False),
            returned=self._message([piece for piece in every if piece.matrix in slots], slots, to_owners=False),
            updated=self._message([piece for piece in every if piece.rank == rank], slots, to_owners=True),
            is_sent=any(piece.rank != self.owners[piece.matrix] for piece in every),
        )

    def _message(self, pieces: list[MatrixPiece], slots: Mapping[int, int], to_owners: bool) -> PieceMessage:
        """Order ``pieces`` by owner (``to_owners``) or else by holder; sender and receiver order them alike."""

        def peer(piece: MatrixPiece) -> int:
            return self.owners[piece.matrix] if to_owners else piece.rank

        counts = [0] * self.ranks
        for piece in pieces:
            counts[peer(piece)] += piece.numel
        ordered = sorted(pieces, key=lambda piece: (peer(piece), piece.matrix, piece.tensor, piece.start))
        return PieceMessage(tuple((slots.get(piece.matrix, -1), piece) for piece in ordered), tuple(counts))

    def _shape_first(self, matrix: int) -> tuple[object, ...]:
        return *self.matrices[matrix].form, matrix


def plan_of_portion(held: Sequence[Sequence[WeightHolding]], costs: Mapping[tuple[int, int], float]) -> PortionPlan:
    """The plan of weights that are stepped together, ``held`` by each rank; ``costs``: FLOP by (rows, columns).

    Raises ValueError where the ranks of a copy do not hold the whole of a matrix.
    """
    indices: dict[Matrix, int] = {}
    for weights in held:
        for weight in weights:
            for matrix in matrices_of(weight):
                indices.setdefault(matrix, len(indices))
    pieces: list[list[MatrixPiece]] = [[] for _ in indices]
    for rank, weights in enumerate(held):
        for weight in weights:
            for piece in pieces_of(weight, rank, indices):
                pieces[piece.matrix].append(piece)
    matrices = tuple(indices)
    _check_whole(matrices, pieces)
    flop = tuple(costs[each.rows, each.columns] for each in matrices)
    owners = owners_of(pieces, flop, len(held))
    waves = _waves(matrices, owners, len(held))
    return PortionPlan(matrices, flop, owners, tuple(map(tuple, pieces)), waves, len(held))


def shapes_of(held: Sequence[Sequence[WeightHolding]]) -> set[tuple[int, int]]:
    """The rows and columns of all matrices."""
    return {(each.rows, each.columns) for weights in held for weight in weights for each in matrices_of(weight)}


def owners_of(pieces: Sequence[Sequence[MatrixPiece]], costs: Sequence[float], ranks: int) -> tuple[int, ...]:
    """The owner of each matrix: the costliest is given first, to the holder of a piece that would be done first."""
    loads, owners = [0.0] * ranks, [0] * len(pieces)
    for matrix in sorted(range(len(pieces)), key=lambda each: (-costs[each], each)):
        own: dict[int, int] = {}
        copies: dict[tuple[int, ...], int] = {}
        for piece in pieces[matrix]:
            own[piece.rank] = own.get(piece.rank, 0) + piece.numel
            copies[piece.copy] = copies.get(piece.copy, 0) + piece.numel
        whole = max(copies.values())

        ends = {rank: loads[rank] + costs[matrix] + FLOP_OF_AN_ELEMENT * (whole - held) for rank, held in own.items()}
        owner = min(ends, key=lambda rank: (ends[rank], rank))
        owners[matrix], loads[owner] = owner, ends[owner]
    return tuple(owners)


def _waves(matrices: Sequence[Matrix], owners: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """The matrices of each wave: as many of each owner as its elements allow, one shape behind the other."""
    waves: list[list[int]] = []
    sizes = [each.rows * each.columns for each in matrices]
    for rank in range(ranks):
        own = [matrix for matrix, owner in enumerate(owners) if owner == rank]
        most = min(max(sum(sizes[each] for each in own) // WAVES, LEAST_WAVE), WAVE)
        index, elements = 0, 0
        for matrix in sorted(own, key=lambda each: (*matrices[each].form, each)):
            if elements and elements + sizes[matrix] > most:
                index, elements = index + 1, 0
            if index == len(waves):
                waves.append([])
            waves[index].append(matrix)
            elements += sizes[matrix]
    return tuple(map(tuple, waves))


def _check_whole(matrices: Sequence[Matrix], pieces: Sequence[Sequence[MatrixPiece]]) -> None:
    for matrix, own in zip(matrices, pieces, strict=True):
        copies: dict[tuple[int, ...], int] = {}
        for piece in own:
            copies[piece.copy] = copies.get(piece.copy, 0) + piece.numel
        if set(copies.values()) != {matrix.rows * matrix.columns}:
            raise ValueError(
                f"optimizer.type Muon: {matrix.name} has matrices of {matrix.rows} x {matrix.columns}, of which the "
                f"ranks hold {sorted(copies.values())} elements in the same step. What to do: the same parameter "
                "groups on every rank; with ZeRO 3, a zero_optimization.sub_group_size that holds all weights"
            )
