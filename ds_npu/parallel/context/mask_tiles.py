"""Mask tiles: the keys of one rank that rows of another see, as rectangles with a causal or band mask.

Rows and keys are some tokens of one sequence, in order. The keys that a row sees are then adjacent among the rank's
keys, and from one row to the next the first and the last of them remain or advance by one, but for a few jumps. So a
block of ring attention is a few tiles, whatever the mask, the documents and the sharding; in a zigzag ring it is one.
Each tile is one kernel call (``kernel_calls``).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ds_npu.ops.attention import Mask
from ds_npu.parallel.context.load_balance import Pieces


class Tile(NamedTuple):
    """``rows`` and ``keys`` are indices among the tokens of the two ranks; every row sees a key and is in one tile.

    ``before`` and ``after`` are those of ``ops.attention.Mask``, counted from the lower right corner.
    """

    rows: range
    keys: range
    before: int | None
    after: int | None

    @property
    def pairs(self) -> int:
        """Rows times the keys they see: the scores that are needed."""
        hidden = len(self.rows) * (len(self.rows) - 1) // 2
        bounds = (self.before is not None) + (self.after is not None)
        return len(self.rows) * len(self.keys) - bounds * hidden


@dataclass(frozen=True)
class _Edge:
    """The first key (or the key past the last) of consecutive rows: ``start`` + row * ``slope``.

    ``slope`` is None for a single row.
    """

    start: int
    slope: int | None

    def at(self, row: int) -> int:
        return self.start + row * (self.slope or 0)

    def moved(self, rows: int) -> _Edge:
        return _Edge(self.at(rows), self.slope)

    def joined(self, other: _Edge, rows: int) -> _Edge | None:
        """This edge of ``rows`` rows and the following ``other`` as one; None where ``other`` does not continue it."""
        step = other.start - self.at(rows - 1)
        slope = step if self.slope is None else self.slope
        fits = slope in (0, 1) and step == slope and other.slope in (None, slope)
        return _Edge(self.start, slope) if fits else None


class _Run(NamedTuple):
    """Consecutive rows over which each of the two edges has one slope."""

    rows: range
    low: _Edge
    high: _Edge
    document: int

    def trimmed(self) -> _Run | None:
        """This run without the rows at either end that see no key; None where no row is left."""
        count = len(self.rows)
        seen = [self.high.at(row) - self.low.at(row) for row in (0, count - 1)]
        if max(seen) <= 0:
            return None
        first = max(1 - seen[0], 0)
        count -= first + max(1 - seen[1], 0)
        rows = range(self.rows.start + first, self.rows.start + first + count)
        return _Run(rows, _single(self.low.moved(first), count), _single(self.high.moved(first), count), self.document)

    def joined(self, other: _Run) -> _Run | None:
        if self.document != other.document or self.rows.stop != other.rows.start:
            return None
        low, high = (a.joined(b, len(self.rows)) for a, b in ((self.low, other.low), (self.high, other.high)))
        return _Run(range(self.rows.start, other.rows.stop), low, high, self.document) if low and high else None

    def tile(self) -> Tile:
        count = len(self.rows)
        keys = range(self.low.start, self.high.at(count - 1))
        before = len(keys) - count if self.low.slope and count > 1 else None
        return Tile(self.rows, keys, before, 0 if self.high.slope and count > 1 else None)


def _single(edge: _Edge, rows: int) -> _Edge:
    return edge if rows > 1 else _Edge(edge.start, None)


def tiles(rows: Pieces, keys: Pieces, mask: Mask, documents: Pieces) -> list[Tile]:
    """The tiles of ``keys`` that ``rows`` see: the band of ``mask`` (its bounds only) within each of the ``documents``.

    Row p sees key x of its document if p - before <= x <= p + after. All are tokens of one sequence.
    """
    key_index = _TokenIndex(keys)
    found: list[_Run] = []
    for run in _runs(rows, key_index, mask, documents):
        kept = run.trimmed()
        if kept is None:
            continue
        joined = found[-1].joined(kept) if found else None
        found[-1:] = [joined] if joined else [*found[-1:], kept]
    return [run.tile() for run in found]


class _TokenIndex:
    """A map from tokens of the sequence to their indices among the tokens of ``pieces``."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self.starts = [piece.start for piece in pieces]
        self.before = [0, *itertools.accumulate(map(len, pieces))]

    def count(self, token: int) -> int:
        """How many of the tokens come before ``token``."""
        at = bisect.bisect_right(self.starts, token)
        if at == 0:
            return 0
        return self.before[at - 1] + min(token - self.starts[at - 1], len(self.pieces[at - 1]))

    def bends(self, within: range) -> list[int]:
        """Tokens at which ``count`` begins or ceases to rise: the bounds of the pieces in and around ``within``."""
        first = max(bisect.bisect_right(self.starts, within.start) - 1, 0)
        last = bisect.bisect_right(self.starts, within.stop)
        return [token for piece in self.pieces[first:last] for token in (piece.start, piece.stop)]


def _runs(rows: Pieces, keys: _TokenIndex, mask: Mask, documents: Pieces) -> Iterator[_Run]:
    ends = [document.stop for document in documents]
    offset = 0
    for piece in rows:
        at = bisect.bisect_right(ends, piece.start)
        while at < len(documents) and documents[at].start < piece.stop:
            document = documents[at]
            some = range(max(piece.start, document.start), min(piece.stop, document.stop))
            first = offset + some.start - piece.start
            for part in _straight(some, keys.bends(document), mask, document):
                here = range(first + part.start - some.start, first + part.stop - some.start)
                low, high = (_edge(part, keys, bound) for bound in _bounds(mask, document))
                yield _Run(here, low, high, at)
            at += 1
        offset += len(piece)


def _bounds(mask: Mask, document: range) -> Iterator[tuple[int | None, int, int, int]]:
    """Yield the bound of a row's first key, then that of the key past its last.

    A bound is (distance from the row, or None; the key in that case; the least and the most that the key can be).
    """
    yield (None if mask.before is None else -mask.before), document.start, document.start, document.stop
    yield (None if mask.after is None else mask.after + 1), document.stop, document.start, document.stop


def _edge(rows: range, keys: _TokenIndex, bound: tuple[int | None, int, int, int]) -> _Edge:
    distance, unbounded, least, most = bound

    def key(row: int) -> int:
        return keys.count(unbounded if distance is None else min(max(row + distance, least), most))

    first, last = key(rows[0]), key(rows[-1])
    return _Edge(first, None if len(rows) == 1 else (last - first) // (len(rows) - 1))


def _straight(rows: range, bends: list[int], mask: Mask, document: range) -> Iterator[range]:
    """Divide ``rows`` where the slope of an edge may change."""
    bounds = {rows.start, rows.stop}
    for distance, _, least, most in _bounds(mask, document):
        if distance is not None:
            bounds |= {bend - distance for bend in (*bends, least, most)}
    inside = sorted(bound for bound in bounds if rows.start <= bound <= rows.stop)
    return (range(begin, end) for begin, end in itertools.pairwise(inside))
