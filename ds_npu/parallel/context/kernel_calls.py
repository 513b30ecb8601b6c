"""The attention kernel calls of one rank as data: each names rows, the keys of a block that they see, and a mask.

A block of ring attention (Liu 2023, arXiv:2310.01889) is one call in a zigzag ring and a few where documents are packed
(``mask_tiles``).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ds_npu.comm.host_copy import copy_to_device
from ds_npu.ops.attention import Mask
from ds_npu.ops.attention.options import Layout
from ds_npu.parallel.context.load_balance import Tokens
from ds_npu.parallel.context.mask_tiles import Tile, tiles
from ds_npu.parallel.tensor.sharding import joined_ranges

TOKEN_DIM = 1

Bounds = tuple[int | None, int | None]
"""``before`` and ``after`` of a Mask."""


class RangeSelection:
    """A selection of indices along a dim (by default the tokens of [B, S, N, D]): ``ranges``, in this order."""

    def __init__(self, ranges: Sequence[range]) -> None:
        self.ranges = joined_ranges(ranges)
        self._indices: dict[torch.device, torch.Tensor] = {}

    @cached_property
    def single(self) -> range | None:
        """The only range; None where there are several."""
        return self.ranges[0] if len(self.ranges) == 1 else None

    def index(self, device: torch.device) -> torch.Tensor:
        """The indices, int64; made once for each device."""
        if device not in self._indices:
            indices = torch.cat([torch.arange(each.start, each.stop) for each in self.ranges])
            self._indices[device] = copy_to_device(indices, device)
        return self._indices[device]

    def take(self, x: torch.Tensor, dim: int = TOKEN_DIM) -> torch.Tensor:
        """The selected part of ``x``: a view where it is one range, else a copy."""
        if self.single is not None:
            return x.narrow(dim, self.single.start, len(self.single))
        return x.index_select(dim, self.index(x.device))

    def add(self, target: torch.Tensor, x: torch.Tensor) -> None:
        """Add ``x`` to the selected part of ``target``; an index may be selected twice."""
        if self.single is not None:
            target.narrow(TOKEN_DIM, self.single.start, len(self.single)).add_(x)
        else:
            target.index_add_(TOKEN_DIM, self.index(x.device), x.to(target.dtype))


@dataclass(frozen=True, eq=False)
class KernelCall:
    """One call of the attention operator: ``rows`` of the query, ``keys`` of a block, in ``layout`` BSND or TND."""

    rows: RangeSelection
    keys: RangeSelection
    mask: Mask
    pairs: int
    """The number of pairs of a row and a key that it sees: the scores of each head."""

    @property
    def layout(self) -> Layout:
        return "TND" if self.mask.ends_q else "BSND"


def calls_for_tiles(found: Sequence[Tile], packs: bool) -> list[KernelCall]:
    """The kernel calls for the tiles of one block; with ``packs`` (the batch is one sequence), tiles with the same mask
    are the packed documents of one call."""
    alike: dict[tuple[int | None, int | None, range | None], list[Tile]] = {}
    for tile in found:
        alike.setdefault((tile.before, tile.after, None if packs else tile.rows), []).append(tile)
    return [_call(Mask(before, after), group) for (before, after, _), group in alike.items()]


def _call(mask: Mask, group: Sequence[Tile]) -> KernelCall:
    if len(group) > 1:
        ends = (list(itertools.accumulate(len(part) for part in parts)) for parts in _parts(group))
        mask = mask.packed(*ends)
    rows, keys = (RangeSelection(parts) for parts in _parts(group))
    return KernelCall(rows, keys, mask, sum(tile.pairs for tile in group))


def _parts(group: Sequence[Tile]) -> tuple[list[range], list[range]]:
    return [tile.rows for tile in group], [tile.keys for tile in group]


@functools.lru_cache(maxsize=256)
def block_calls(tokens: Tokens, rank: int, source: int | None, bounds: Bounds, packs: bool) -> list[KernelCall]:
    """Ring rank ``rank``'s kernel calls with the keys of ring rank ``source``, or of all tokens in order (None)."""
    keys = (range(tokens.total),) if source is None else tokens.ring[source]
    return calls_for_tiles(tiles(tokens.ring[rank], keys, Mask(*bounds), tokens.documents), packs)


def pairs(tokens: Tokens, rank: int, mask: Mask) -> int:
    """The scores of each head that ring rank ``rank`` computes under the bounds of ``mask``: its load.

    Where one sample of ``tokens`` describes the whole batch, this counts the scores of one sample.
    """
    found = tiles(tokens.ring[rank], (range(tokens.total),), mask, tokens.documents)
    return sum(tile.pairs for tile in found)


@functools.lru_cache(maxsize=64)
def last_step(tokens: Tokens, bounds: Bounds) -> int | None:
    """The last step of a single ring in which any rank sees keys of its block; None: take all steps."""
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
