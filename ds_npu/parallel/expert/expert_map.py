"""The map from ranks along ep to the experts they hold, and the one that balances load. Pure data, no tensors."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ds_npu.parallel.tensor.sharding import Ranges, Sharding

ExpertMap = tuple[tuple[int, ...], ...]
"""The experts of each rank, equally many, in the order in which the rank holds them."""
Loads = Sequence[int]
"""How often each expert was chosen."""

PAYS = 0.05
"""Experts move only if the load of the heaviest rank, for which all others wait, falls by at least this fraction."""
EVEN = 0.01
"""The fraction by which the heaviest rank may be above the mean."""


def plain_map(experts: int, ranks: int) -> ExpertMap:
    """Consecutive experts on each rank."""
    local = experts // ranks
    return tuple(tuple(range(rank * local, (rank + 1) * local)) for rank in range(ranks))


def slots_of(expert_map: ExpertMap) -> list[int]:
    """The slot of each expert: its index in the list of all ranks' experts."""
    slots = [0] * sum(map(len, expert_map))
    for slot, expert in enumerate(itertools.chain(*expert_map)):
        slots[expert] = slot
    return slots


def sharding_of_map(expert_map: ExpertMap) -> Sharding:
    """The sharding of dim 0 of a weight of all experts over the ranks of ``expert_map``."""
    ranges: list[Ranges] = []
    for held in expert_map:
        mine: list[tuple[int, int]] = []
        for expert in held:
            if mine and mine[-1][1] == expert:
                mine[-1] = (mine[-1][0], expert + 1)
            else:
                mine.append((expert, expert + 1))
        ranges.append(tuple(mine))
    return Sharding(0, sum(map(len, expert_map)), tuple(ranges))


def heaviest(loads: Loads, expert_map: ExpertMap) -> int:
    """The load of the rank that has the most."""
    return max(sum(loads[expert] for expert in held) for held in expert_map)


def map_by_load(loads: Loads, before: ExpertMap) -> ExpertMap:
    """The expert map that balances ``loads``; ``before`` itself unless the heaviest rank's load falls by ``PAYS``.

    The heaviest rank swaps an expert with the lightest one, such that the heavier of both becomes as light as
    possible, or with the next lightest where that makes it no lighter. This repeats until the heaviest rank is within
    ``EVEN`` of the mean or no swap helps. Among equals the first rank and expert are taken. An expert that remains on
    its rank keeps its index there.
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
    """(heaviest rank, the expert it gives) and (other rank, the expert it gives); None where no swap helps.

    Where the experts' loads differ by d and the ranks' ``totals`` by g, the heavier rank becomes lighter by
    min(d, g - d).
    """
    source = totals.index(max(totals))
    for target in sorted(range(len(held)), key=totals.__getitem__):
        gap = totals[source] - totals[target]
        ordered = sorted((loads[expert], expert) for expert in held[target])
        best, pair = 0, None
        for given in sorted(held[source]):
            # min(d, g - d) is largest for one of the two experts whose loads enclose this value.
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
    """The elements [start, stop) that a rank holds of the flattened weight [E / ep, ...] of its rank along ep."""

    ep_rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class Move:
    """One expert that moves; source and target are (rank along ep, index on that rank)."""

    source: tuple[int, int]
    target: tuple[int, int]

    def pieces(self, size: int, sender: Elements, receiver: Elements) -> tuple[int, int, int] | None:
        """The elements that ``sender`` sends to ``receiver``: the first one's offset in each, and the length.

        ``size``: the elements of one expert. None where there are none.
        """
        (source, here), (target, there) = self.source, self.target
        if (sender.ep_rank, receiver.ep_rank) != (source, target):
            return None
        # Offsets from the expert's first element.
        first = max(sender.start - here * size, receiver.start - there * size, 0)
        stop = min(sender.stop - here * size, receiver.stop - there * size, size)
        if stop <= first:
            return None
        return here * size + first - sender.start, there * size + first - receiver.start, stop - first


def moves_between(before: ExpertMap, after: ExpertMap) -> Iterator[Move]:
    """The experts whose slots change, in the order of their new slots."""
    found = {expert: (rank, index) for rank, held in enumerate(before) for index, expert in enumerate(held)}
    for rank, held in enumerate(after):
        for index, expert in enumerate(held):
            if found[expert] != (rank, index):
                yield Move(found[expert], (rank, index))
