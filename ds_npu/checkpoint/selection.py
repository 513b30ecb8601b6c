"""The blocks of written parts that make up one rank's part of a weight: index arithmetic, without files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_npu.parallel.tensor.sharding import Sharding
from ds_npu.topology.degrees import Axis

Shard = tuple[Sharding, int]
"""A sharding, and the rank along its axis."""
SLAB_ELEMENTS = 2**22
"""Most elements of a block's rows, which are read whole, also where only some of their columns are wanted."""


@dataclass(frozen=True)
class Selection:
    """Flat elements ``first`` to ``first + numel`` (None: the end) of the part that ``shards`` take from a weight."""

    shards: Sequence[Shard] = ()
    first: int = 0
    numel: int | None = None


class Held(NamedTuple):
    """Indices ``start`` to ``stop`` of the plain weight along a dim; in a part they begin at index ``position``."""

    start: int
    stop: int
    position: int


class Copied(NamedTuple):
    """``length`` indices along a dim to copy, from ``source`` on in a written part to ``target`` on in a selection."""

    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Block:
    """Rows of the part that was written at ``coordinates``, and along each further dim the indices to copy."""

    coordinates: Mapping[Axis, int]
    rows: Copied
    columns: tuple[tuple[Copied, ...], ...]

    def slices(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Slices of each piece in the rows of the part, and in the rows of the selection."""
        for chosen in itertools.product(*self.columns):
            every = (Copied(0, self.rows.target, self.rows.length), *chosen)
            sources = tuple(slice(each.source, each.source + each.length) for each in every)
            yield sources, tuple(slice(each.target, each.target + each.length) for each in every)


@dataclass(frozen=True)
class Selected:
    """The rows that a selection needs, and the blocks that fill them."""

    shape: tuple[int, ...]
    """The shape of the rows."""
    skipped: int
    """Elements of the first row that are not selected."""
    numel: int
    blocks: tuple[Block, ...]


def selected(shape: Sequence[int], written: Mapping[Axis, Sharding], wanted: Selection) -> Selected:
    """The blocks that fill ``wanted``, of a weight of the plain ``shape`` written in the parts of ``written``."""
    sizes = tuple(shape) or (1,)
    mine = [held for held, _ in _held(sizes, wanted.shards)]
    lengths = [_length(each) for each in mine]
    width = math.prod(lengths[1:])
    numel = lengths[0] * width - wanted.first if wanted.numel is None else wanted.numel
    begin = wanted.first // width if width else 0
    end = -(-(wanted.first + numel) // width) if width else 0
    mine[0] = _taken(mine[0], [(begin, end)])
    blocks = tuple(_blocks(sizes, written, mine)) if numel else ()
    return Selected((end - begin, *lengths[1:]), wanted.first - begin * width, numel, blocks)


def _length(held: Sequence[Held]) -> int:
    return sum(each.stop - each.start for each in held)


def _held(sizes: Sequence[int], shards: Sequence[Shard]) -> list[tuple[list[Held], list[Held]]]:
    """For each dim the indices that a rank holds, and its own.

    Its own are those that no lower rank of an axis holds, too.
    """
    found = [([Held(0, size, 0)], [Held(0, size, 0)]) for size in sizes]
    for sharding, rank in shards:
        held, own = found[sharding.dim]
        lower = [each for before in range(rank) for each in _taken(held, sharding.ranges[before])]
        mine = sharding.ranges[rank]
        found[sharding.dim] = _taken(held, mine), _without(_taken(own, mine), lower)
    return found


def _taken(held: Sequence[Held], ranges: Iterable[tuple[int, int]]) -> list[Held]:
    """Indices of ``held`` whose positions are in ``ranges``; in the result the ranges follow each other."""
    found, position = [], 0
    for start, stop in ranges:
        for each in held:
            first = max(start, each.position)
            last = min(stop, each.position + each.stop - each.start)
            if first < last:
                shift = each.start - each.position
                found.append(Held(first + shift, last + shift, position + first - start))
        position += stop - start
    return found


def _without(held: Sequence[Held], others: Sequence[Held]) -> list[Held]:
    found = list(held)
    for other in others:
        left = []
        for each in found:
            for start, stop in ((each.start, min(each.stop, other.start)), (max(each.start, other.stop), each.stop)):
                if start < stop:
                    left.append(Held(start, stop, each.position + start - each.start))
        found = left
    return found


def _copied(mine: Sequence[Held], theirs: Sequence[Held]) -> list[Copied]:
    found = []
    for own in mine:
        for each in theirs:
            start = max(own.start, each.start)
            stop = min(own.stop, each.stop)
            if start < stop:
                source = each.position + start - each.start
                target = own.position + start - own.start
                found.append(Copied(source, target, stop - start))
    return found


def _blocks(sizes: Sequence[int], written: Mapping[Axis, Sharding], mine: Sequence[Sequence[Held]]) -> Iterator[Block]:
    axes = list(written)
    for ranks in itertools.product(*(range(len(written[axis].ranges)) for axis in axes)):
        theirs = _held(sizes, [(written[axis], rank) for axis, rank in zip(axes, ranks, strict=True)])
        rows, *columns = [tuple(_copied(own, first)) for own, (_, first) in zip(mine, theirs, strict=True)]
        if not all(columns):
            continue
        width = math.prod(_length(held) for held, _ in theirs[1:])
        most = max(SLAB_ELEMENTS // width, 1)
        for each in rows:
            for begin in range(0, each.length, most):
                slab = Copied(each.source + begin, each.target + begin, min(most, each.length - begin))
                yield Block(dict(zip(axes, ranks, strict=True)), slab, tuple(columns))
