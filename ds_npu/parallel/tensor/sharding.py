"""The sharding of a weight over the ranks of an axis: index ranges along one dim, as data."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

Ranges = tuple[tuple[int, int], ...]
"""Half-open index ranges, in the order in which they are held."""


@dataclass(frozen=True)
class Sharding:
    """The sharding of a tensor of ``size`` along ``dim``: rank r of the axis holds ``ranges[r]``."""

    dim: int
    size: int
    ranges: tuple[Ranges, ...]

    def length(self, rank: int) -> int:
        """The number of indices that ``rank`` holds."""
        return sum(stop - start for start, stop in self.ranges[rank])

    def take(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A copy of the shard of ``whole`` that ``rank`` holds; raises ValueError where ``whole`` has another size.

        Where ``whole`` is an expanded view (a probe's weight has more elements than memory), the shard is a view too,
        or a copy without the expanded dims.
        """
        if whole.shape[self.dim] != self.size:
            raise ValueError(f"a tensor of shape {tuple(whole.shape)} was given; dim {self.dim} must have {self.size}")
        ranges = self.ranges[rank] or ((0, 0),)
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in ranges]
        if whole.untyped_storage().nbytes() >= whole.nbytes:
            return torch.cat(parts, dim=self.dim)
        if len(parts) == 1:
            return parts[0]
        alike = [dim for dim in range(whole.dim()) if whole.stride(dim) == 0 and dim != self.dim]
        for dim in alike:
            parts = [each.narrow(dim, 0, 1) for each in parts]
        shape = [-1 if dim not in alike else length for dim, length in enumerate(whole.shape)]
        return torch.cat(parts, dim=self.dim).expand(shape)

    def assemble(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole tensor from the shard of each rank."""
        shape = list(parts[0].shape)
        shape[self.dim] = self.size
        whole = parts[0].new_empty(shape)
        for part, ranges in zip(parts, self.ranges, strict=True):
            lengths = [stop - start for start, stop in ranges]
            pieces = torch.split(part, lengths, dim=self.dim)
            for piece, (start, stop) in zip(pieces, ranges, strict=True):
                whole.narrow(self.dim, start, stop - start).copy_(piece)
        return whole


def joined_ranges(ranges: Iterable[range]) -> list[range]:
    """``ranges`` in their order; a range that begins where the one before ends is joined to it."""
    found: list[range] = []
    for each in ranges:
        if found and found[-1].stop == each.start:
            found[-1] = range(found[-1].start, each.stop)
        else:
            found.append(each)
    return found


def near_even(count: int, parts: int, what: str = "columns") -> list[tuple[int, int]]:
    """``parts`` consecutive ranges of 0 .. count whose lengths differ by at most one, the longer ones first.

    Raises ValueError where ``count`` is less than ``parts``.
    """
    if count < parts:
        raise ValueError(f"{count} {what} cannot be sharded over {parts} tensor ranks: each needs at least one")
    short, longer = divmod(count, parts)
    bounds = [0, *itertools.accumulate(short + (index < longer) for index in range(parts))]
    return list(itertools.pairwise(bounds))


def shard_sections(dim: int, sections: Sequence[int], tensor_size: int, unit: int = 1) -> Sharding:
    """Shard each of the ``sections`` of ``dim`` (one behind the other, as in a fused gate-up weight) near-evenly.

    A section is divided between units of ``unit`` indices (a head). Raises ValueError for a section with fewer units
    than tensor ranks.
    """
    starts = [0, *itertools.accumulate(sections)]
    ranges: list[Ranges] = []
    for rank in range(tensor_size):
        mine = [near_even(section // unit, tensor_size)[rank] for section in sections]
        ranges.append(tuple((base + a * unit, base + b * unit) for base, (a, b) in zip(starts[:-1], mine, strict=True)))
    return Sharding(dim, starts[-1], tuple(ranges))
