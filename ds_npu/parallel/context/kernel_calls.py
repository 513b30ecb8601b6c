"""The kernel calls of one rank's attention, as data: which of its rows, which of a block's keys, under which mask."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ds_npu.ops.attention import Mask
from ds_npu.ops.attention.options import Layout
from ds_npu.parallel.context.load_balance import Tokens, on_device
from ds_npu.parallel.context.mask_tiles import Tile, tiles

TOKEN_DIM = 1

Bounds = tuple[int | None, int | None]
"""``before`` and ``after`` of a Mask."""


class Places:
    """Some places along the tokens of a tensor [B, S, N, D]: ``ranges``, in the order in which they are taken."""

    def __init__(self, ranges: Sequence[range]) -> None:
        joined: list[range] = []
        for each in ranges:
            if joined and joined[-1].stop == each.start:
                joined[-1] = range(joined[-1].start, each.stop)
            else:
                joined.append(each)
        self.ranges = joined
        self._indices: dict[torch.device, torch.Tensor] = {}

    @cached_property
    def one(self) -> range | None:
        """The only range; None where there are several."""
        return self.ranges[0] if len(self.ranges) == 1 else None

    def index(self, device: torch.device) -> torch.Tensor:
        """The places themselves; made once for each device."""
        if device not in self._indices:
            places = torch.cat([torch.arange(each.start, each.stop) for each in self.ranges])
            self._indices[device] = on_device(places, device)
        return self._indices[device]

    def take(self, x: torch.Tensor, dim: int = TOKEN_DIM) -> torch.Tensor:
        """What of ``x`` is there, a view where it is one range."""
        if self.one is not None:
            return x.narrow(dim, self.one.start, len(self.one))
        return x.index_select(dim, self.index(x.device))

    def add(self, target: torch.Tensor, x: torch.Tensor) -> None:
        """Add ``x`` to what of ``target`` is there; a place may be there twice."""
        if self.one is not None:
            target.narrow(TOKEN_DIM, self.one.start, len(self.one)).add_(x)
        else:
            target.index_add_(TOKEN_DIM, self.index(x.device), x.to(target.dtype))


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the operator with ``rows`` of the query and ``keys`` of a block, in ``layout`` BSND or TND."""

    rows: Places
    keys: Places
    mask: Mask
    pairs: int
    """Rows times keys that they see, of which there is one score for each head."""

    @property
    def layout(self) -> Layout:
        return "TND" if self.mask.ends_q else "BSND"


def calls_of(found: Sequence[Tile], packs: bool) -> list[Call]:
    """The calls for the tiles of one block; where the kernel ``packs`` (one sequence is given), those with the same
    mask are one call, as its documents."""
    alike: dict[tuple[int | None, int | None, range | None], list[Tile]] = {}
    for tile in found:
        alike.setdefault((tile.before, tile.after, None if packs else tile.rows), []).append(tile)
    return [_call(Mask(before, after), group) for (before, after, _), group in alike.items()]


def _call(mask: Mask, group: Sequence[Tile]) -> Call:
    if len(group) > 1:
        ends = (list(itertools.accumulate(len(part) for part in parts)) for parts in _parts(group))
        mask = mask.packed(*ends)
    rows, keys = (Places(parts) for parts in _parts(group))
    return Call(rows, keys, mask, sum(tile.pairs for tile in group))


def _parts(group: Sequence[Tile]) -> tuple[list[range], list[range]]:
    return [tile.rows for tile in group], [tile.keys for tile in group]


@functools.lru_cache(maxsize=256)
def block_calls(tokens: Tokens, rank: int, source: int | None, bounds: Bounds, packs: bool) -> list[Call]:
    """Ring rank ``rank``'s calls with the keys of ring rank ``source``, or of all tokens in their order (None)."""
    keys = (range(tokens.total),) if source is None else tokens.ring[source]
    return calls_of(tiles(tokens.ring[rank], keys, Mask(*bounds), tokens.documents), packs)


def pairs(tokens: Tokens, rank: int, mask: Mask) -> int:
    """What ring rank ``rank`` computes under the bounds of ``mask``: scores of each head, a batch being one sample of
    ``tokens`` where that stands for all."""
    found = tiles(tokens.ring[rank], (range(tokens.total),), mask, tokens.documents)
    return sum(tile.pairs for tile in found)


@functools.lru_cache(maxsize=64)
def last_step(tokens: Tokens, bounds: Bounds) -> int | None:
    """After which step of a single ring no rank needs a further block; None: none is left out, or it is not known."""
    if None in bounds or len(tokens.documents) > 1:
        return None
    size = len(tokens.ring)
    needed = (
        step
        for step in range(size)
        for rank in range(size)
        if tiles(tokens.ring[rank], tokens.ring[(rank - step) % size], Mask(*bounds), tokens.documents)
    )
    return max(needed, default=0)
