"""Which rank along ep holds which experts, and where they should be by their load. Pure data, no tensors."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ds_npu.parallel.tensor.sharding import Ranges, Sharding

Places = tuple[tuple[int, ...], ...]
"""The experts of each rank, equally many, in the order in which the rank holds them."""
Loads = Sequence[int]
"""How often each expert was chosen."""

PAYS = 0.05
"""Experts move only if the load of the heaviest rank, for which all others wait, falls by this share of it."""
EVEN = 0.01
"""How far over the mean the heaviest rank may remain."""


def plain_places(experts: int, ranks: int) -> Places:
    """Consecutive experts on each rank."""
    local = experts // ranks
    return tuple(tuple(range(rank * local, (rank + 1) * local)) for rank in range(ranks))


def slots_of(places: Places) -> list[int]:
    """By expert, its place in the row of all ranks' experts."""
    slots = [0] * sum(map(len, places))
    for slot, expert in enumerate(itertools.chain(*places)):
        slots[expert] = slot
    return slots


def sharding_of_places(places: Places) -> Sharding:
    """How dim 0 of a weight of all experts is sharded over the ranks that hold them so."""
    ranges: list[Ranges] = []
    for held in places:
        mine: list[tuple[int, int]] = []
        for expert in held:
            if mine and mine[-1][1] == expert:
                mine[-1] = (mine[-1][0], expert + 1)
            else:
                mine.append((expert, expert + 1))
        ranges.append(tuple(mine))
    return Sharding(0, sum(map(len, places)), tuple(ranges))


def heaviest(loads: Loads, places: Places) -> int:
    """The load of the rank that has the most."""
    return max(sum(loads[expert] for expert in held) for held in places)


def places_by_load(loads: Loads, before: Places) -> Places:
    """Where the experts should be: ``before`` itself unless the heaviest rank's load falls by ``PAYS`` of it.

    The heaviest rank swaps an expert with the lightest one, such that the heavier of both becomes as light as
    possible, or with the next lightest where that makes it no lighter; and again, until the heaviest rank is within
    ``EVEN`` of the mean or no swap helps. Of equals the first rank and expert are taken. Experts that stay on their
    rank keep their places on it.
    """
    held = [set(each) for each in before]
    enough = (1 + EVEN) * sum(loads) / len(before)
    for _ in loads:  # At most as many swaps as there are experts.
        totals = [sum(loads[expert] for expert in each) for each in held]
        swap = _swap(loads, held, totals) if max(totals) > enough else None
        if swap is None:
            break
        (source, given), (target, taken) = swap
        held[source] = held[source] - {given} | {taken}
        held[target] = held[target] - {taken} | {given}
    after = tuple(_kept_order(was, now) for was, now in zip(before, held, strict=True))
    return after if heaviest(loads, after) <= (1 - PAYS) * heaviest(loads, before) else before


def _swap(loads: Loads, held: list[set[int]], totals: list[int]) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The heaviest rank and the expert it gives, another and the one it gives; None where that makes none lighter.

    With experts whose loads differ by d, of ranks whose ``totals`` differ by g, the heavier of both ranks becomes
    lighter by min(d, g - d).
    """
    source = totals.index(max(totals))
    for target in sorted(range(len(held)), key=totals.__getitem__):
        gap = totals[source] - totals[target]
        ordered = sorted((loads[expert], expert) for expert in held[target])
        best, pair = 0, None
        for given in sorted(held[source]):
            # min(d, g - d) is largest for the two whose loads are around this one.
            index = bisect.bisect(ordered, (loads[given] - gap / 2, -1))
            for load, taken in ordered[max(index - 1, 0) : index + 1]:
                difference = loads[given] - load
                if min(difference, gap - difference) > best:
                    best, pair = min(difference, gap - difference), (given, taken)
        if pair is not None:
            return (source, pair[0]), (target, pair[1])
    return None


def _kept_order(was: tuple[int, ...], now: set[int]) -> tuple[int, ...]:
    arriving = iter(sorted(now.difference(was)))
    return tuple(expert if expert in now else next(arriving) for expert in was)


@dataclass(frozen=True)
class Elements:
    """What a rank holds of the weight [E / ep, ...] of its rank along ep: flat, its elements [start, stop)."""

    ep_rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class Move:
    """One expert that leaves its place: from and to (rank along ep, index on that rank)."""

    source: tuple[int, int]
    target: tuple[int, int]

    def pieces(self, size: int, sender: Elements, receiver: Elements) -> tuple[int, int, int] | None:
        """What ``sender`` has of this expert and ``receiver`` is to have: first elements of each's own, and a length.

        ``size``: the elements of one expert. None where it is nothing.
        """
        (source, here), (target, there) = self.source, self.target
        if (sender.ep_rank, receiver.ep_rank) != (source, target):
            return None
        # Counted from the expert's first element.
        first = max(sender.start - here * size, receiver.start - there * size, 0)
        stop = min(sender.stop - here * size, receiver.stop - there * size, size)
        if stop <= first:
            return None
        return here * size + first - sender.start, there * size + first - receiver.start, stop - first


def moves_between(before: Places, after: Places) -> Iterator[Move]:
    """The experts that leave their places, in the order of their new ones."""
    found = {expert: (rank, index) for rank, held in enumerate(before) for index, expert in enumerate(held)}
    for rank, held in enumerate(after):
        for index, expert in enumerate(held):
            if found[expert] != (rank, index):
                yield Move(found[expert], (rank, index))
