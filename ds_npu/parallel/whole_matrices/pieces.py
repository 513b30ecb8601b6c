"""The pieces of a matrix that ranks hold: shards of tensor and expert ranks, cut by the partitions of ZeRO.

A weight is [leading, rows, columns]: a stack has a matrix for each leading index, and with ``matrix_rows`` one for each
so many rows (a head's). Every rank describes what it holds (``WeightHolding``); all that follows is arithmetic, and
equal on all ranks. No torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

Ranges = tuple[tuple[int, int], ...]
"""Half-open index ranges, in the order in which they are held."""


@dataclass(frozen=True)
class WeightHolding:
    """One rank's part of one weight: the elements of its shard that are in its ZeRO partition.

    Without ZeRO these are all elements of the shard.
    """

    name: str
    shape: tuple[int, ...]
    """The shape in the plain model: 2 dims, 3 of a stack, or 4 of a convolution, whose last three are columns."""
    leading: Ranges
    rows: Ranges
    columns: Ranges
    """The shard, as the indices that the rank has along each of the three dims."""
    first: int
    numel: int
    """The elements of the shard, flat, that are in the rank's partition."""
    tensor: int
    start: int
    """The index of the tensor that the optimizer steps, and the position of element ``first`` in it."""
    portion: int
    """The number of the portion, the weights that one step takes (a group, or a sub-group of ZeRO 3)."""
    copy: tuple[int, ...] = ()
    """Equal on ranks that hold one copy of the weight together."""
    matrix_rows: int = 0
    """Rows of each matrix; 0: all."""


class Matrix(NamedTuple):
    """One matrix that is orthogonalised as a whole."""

    name: str
    leading: int
    first_row: int
    rows: int
    columns: int
    aspect: tuple[int, int]
    """The last two dims of the weight, or of a head's part: a convolution's are those of its kernel."""

    @property
    def form(self) -> tuple[int, int, tuple[int, int]]:
        """Equal for matrices that are iterated in one batch, and scaled alike."""
        return self.rows, self.columns, self.aspect


class MatrixTile(NamedTuple):
    """A rectangle of a matrix that is also a rectangle of a piece, whose elements are stored row by row."""

    start: int
    """The position in the piece of the rows that hold the rectangle."""
    width: int
    """Elements of each of these rows in the piece."""
    column_in_piece: int
    row: int
    rows: int
    column: int
    columns: int


class MatrixPiece(NamedTuple):
    """Elements of one matrix that are contiguous in a tensor of one rank."""

    rank: int
    matrix: int
    """The index of the matrix in the portion."""
    tensor: int
    start: int
    numel: int
    copy: tuple[int, ...]
    tiles: tuple[MatrixTile, ...]


def dims_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The leading, rows and columns of a weight of ``shape``; raises ValueError for other than 2 to 4 dims."""
    if len(shape) == 2:
        return 1, *shape
    if len(shape) == 3:
        return shape
    if len(shape) == 4:
        return 1, shape[0], math.prod(shape[1:])
    raise ValueError(f"a weight of shape {shape} has {len(shape)} dims; matrices are made of 2 to 4")


def matrices_of(weight: WeightHolding) -> Iterator[Matrix]:
    """The matrices of a weight, in order; raises ValueError where ``matrix_rows`` does not divide its rows."""
    leading, rows, columns = dims_of(weight.shape)
    length = weight.matrix_rows or rows
    if rows % length:
        raise ValueError(f"{weight.name}: {rows} rows do not divide into matrices of {length}")
    aspect = (length, weight.shape[-1]) if weight.matrix_rows else weight.shape[-2:]
    for index, first in itertools.product(range(leading), range(0, rows, length)):
        yield Matrix(weight.name, index, first, length, columns, (aspect[0], aspect[1]))


def pieces_of(weight: WeightHolding, rank: int, indices: dict[Matrix, int]) -> Iterator[MatrixPiece]:
    """The pieces that ``rank`` has of the matrices of ``weight``, in the order of its tensor.

    ``indices``: the index of each matrix in the portion.
    """
    own_rows = _length(weight.rows)
    own_columns = _length(weight.columns)
    held = range(weight.first, weight.first + weight.numel)
    for matrix in matrices_of(weight):
        offset = _position(weight.leading, matrix.leading)
        if offset is None:
            continue
        for row, first, rows in _common(weight.rows, matrix.first_row, matrix.rows):
            begin = (offset * own_rows + first) * own_columns
            start = max(begin, held.start)
            stop = min(begin + rows * own_columns, held.stop)
            if start < stop:
                tiles = tuple(_tiles(row, start - begin, stop - begin, weight.columns))
                position = weight.start + start - weight.first
                yield MatrixPiece(rank, indices[matrix], weight.tensor, position, stop - start, weight.copy, tiles)


def _tiles(row: int, start: int, stop: int, columns: Ranges) -> Iterator[MatrixTile]:
    """Tiles of the elements ``start`` to ``stop`` of a block whose first row is ``row``, and that has ``columns``.

    The part of a row before the first whole row, all whole rows, and the part of a row behind them.
    """
    width, base = _length(columns), start
    while start < stop:
        above, left = divmod(start, width)
        rows = (stop - start) // width if left == 0 and stop - start >= width else 1
        end = min((above + rows) * width, stop)
        right = end - (above + rows - 1) * width
        offset = 0
        for first, last in columns:
            low = max(left, offset)
            high = min(right, offset + last - first)
            if low < high:
                column = first + low - offset
                yield MatrixTile(start - base, right - left, low - left, row + above, rows, column, high - low)
            offset += last - first
        start = end


def _common(ranges: Ranges, first: int, length: int) -> Iterator[tuple[int, int, int]]:
    """The parts of ``ranges`` in ``length`` indices from ``first``: (index from first, offset in ranges, length)."""
    offset = 0
    for start, stop in ranges:
        low = max(start, first)
        high = min(stop, first + length)
        if low < high:
            yield low - first, offset + low - start, high - low
        offset += stop - start


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _position(ranges: Ranges, index: int) -> int | None:
    """The offset of ``index`` among the indices of ``ranges``; None where it is in none."""
    offset = 0
    for start, stop in ranges:
        if start <= index < stop:
            return offset + index - start
        offset += stop - start
    return None
