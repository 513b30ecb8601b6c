"""Relocation of experts: the map from ranks along ep to the experts that they hold, and a map that balances the load.

Also the load of each expert, and the exchange of weights and optimizer states.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_npu.comm.collectives import exchange_rows
from ds_npu.parallel.expert.dispatch import pairs_of
from ds_npu.parallel.tensor.sharding import Sharding, joined_ranges

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
    held = (joined_ranges(range(expert, expert + 1) for expert in experts) for experts in expert_map)
    ranges = tuple(tuple((each.start, each.stop) for each in mine) for mine in held)
    return Sharding(0, sum(map(len, expert_map)), ranges)


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
                    best = min(difference, gap - difference)
                    pair = (given, taken)
        if pair is not None:
            return (source, pair[0]), (target, pair[1])
    return None


def _kept_order(was: tuple[int, ...], now: set[int]) -> tuple[int, ...]:
    arriving = iter(sorted(now.difference(was)))
    return tuple(expert if expert in now else next(arriving) for expert in was)


class HeldRange(NamedTuple):
    """Elements [start, stop) of a flattened weight."""

    start: int
    stop: int
    at: int = 0
    """The position of element ``start`` in the tensor that holds the range."""


@dataclass(frozen=True)
class Elements:
    """The elements of the flattened weight [E / ep, ...] that a rank holds: all, or its ZeRO partition."""

    ep_rank: int
    spans: tuple[HeldRange, ...]


@dataclass(frozen=True)
class Move:
    """One expert that moves; source and target are (rank along ep, index on that rank)."""

    source: tuple[int, int]
    target: tuple[int, int]

    def pieces(self, size: int, sender: Elements, receiver: Elements) -> Iterator[tuple[int, int, int]]:
        """Yield the runs that ``sender`` sends: (position in its tensor, position in ``receiver``'s tensor, length).

        ``size``: the elements of one expert.
        """
        source, here = self.source
        target, there = self.target
        if (sender.ep_rank, receiver.ep_rank) != (source, target):
            return
        for own, other in itertools.product(sender.spans, receiver.spans):
            # Offsets from the expert's first element.
            first = max(own.start - here * size, other.start - there * size, 0)
            stop = min(own.stop - here * size, other.stop - there * size, size)
            if first < stop:
                position = own.at + here * size + first - own.start
                yield position, other.at + there * size + first - other.start, stop - first


def moves_between(before: ExpertMap, after: ExpertMap) -> Iterator[Move]:
    """The experts whose slots change, in the order of their new slots."""
    found = {expert: (rank, index) for rank, held in enumerate(before) for index, expert in enumerate(held)}
    for rank, held in enumerate(after):
        for index, expert in enumerate(held):
            if found[expert] != (rank, index):
                yield Move(found[expert], (rank, index))


class MappedExperts:
    """The expert map of one layer, and how often this rank's tokens chose each expert since experts last moved.

    A router numbers experts as the plain model does; ranks hold them by slot, in the order of ``expert_map``.
    """

    def __init__(self, expert_map: ExpertMap) -> None:
        self.expert_map = expert_map
        self._slots: torch.Tensor | None = None
        self._loads: torch.Tensor | None = None

    @property
    def experts(self) -> int:
        return sum(map(len, self.expert_map))

    def start_again(self, expert_map: ExpertMap, loads: Sequence[int] = ()) -> None:
        """Set the expert map, and how often each expert was chosen: ``loads``, or 0 where it is left out."""
        self.expert_map, self._slots = expert_map, None
        self._loads = torch.tensor(loads, dtype=torch.int64) if loads else None

    def slots(self, ids_TK: torch.Tensor) -> torch.Tensor:
        """The slot of each expert of ``ids`` [T, K] int64 in the list of all ranks' experts; -1 for no expert."""
        if self._slots is None or self._slots.device != ids_TK.device:
            # Made once after each relocation. The ids -1 and E are no expert and map to -1.
            self._slots = torch.tensor([-1, *slots_of(self.expert_map), -1], device=ids_TK.device)
        known = (ids_TK + 1).clamp(0, self.experts + 1)
        return self._slots.index_select(0, known.flatten()).view_as(ids_TK)

    def count(self, ids_TK: torch.Tensor) -> None:
        """Count the experts ``ids`` of this rank's tokens, on their device; the host does not wait."""
        mine = pairs_of(ids_TK, self.experts)
        self._loads = mine if self._loads is None else self._loads.to(mine.device).add_(mine)

    def loads(self, device: torch.device) -> torch.Tensor:
        """[E] int64 on ``device``: how often each expert was chosen by tokens of this rank."""
        if self._loads is None:
            return torch.zeros(self.experts, dtype=torch.int64, device=device)
        return self._loads.to(device)


@dataclass(frozen=True)
class HeldElements:
    """The elements this rank holds of one tensor of its experts: the weight, its float32 copy, or a moment."""

    values: torch.Tensor
    """Flat, in the order of the tensor [experts of the rank, ...]; overwritten in place."""
    of_ranks: Sequence[Elements | None]
    """The elements that each rank of the exchange sends and receives; None for a rank that takes no part."""


def exchange_experts(held: HeldElements, size: int, moves: Sequence[Move], group: dist.ProcessGroup) -> int:
    """Carry out ``moves`` in one exchange, which sends only the elements of experts that move.

    ``size``: the elements of one expert. Every rank of ``group`` calls it with the same moves. Returns the bytes that
    this rank sent to others.
    """
    rank, values = dist.get_rank(group), held.values
    mine = held.of_ranks[rank]
    assert mine is not None
    between: dict[tuple[int, int], list[Move]] = {}
    for move in moves:
        between.setdefault((move.source[0], move.target[0]), []).append(move)
    sent = [_pieces(between, size, mine, other) for other in held.of_ranks]
    received = [_pieces(between, size, other, mine) for other in held.of_ranks]
    # Copies, because received elements overwrite the ones that are sent.
    parts = [values.narrow(0, source, length) for pieces in sent for source, _, length in pieces]
    outgoing = torch.cat(parts) if parts else values.new_empty(0)
    counts, expected = ([sum(length for *_, length in each) for each in pieces] for pieces in (sent, received))
    arrived = exchange_rows(outgoing, counts, expected, group).wait()
    begin = 0
    for _, target, length in (piece for pieces in received for piece in pieces):
        values.narrow(0, target, length).copy_(arrived.narrow(0, begin, length))
        begin += length
    return (sum(counts) - counts[rank]) * values.element_size()


def _pieces(
    between: Mapping[tuple[int, int], Sequence[Move]], size: int, sender: Elements | None, receiver: Elements | None
) -> list[tuple[int, int, int]]:
    if sender is None or receiver is None:
        return []
    moves = between.get((sender.ep_rank, receiver.ep_rank), ())
    return [piece for move in moves for piece in move.pieces(size, sender, receiver)]
