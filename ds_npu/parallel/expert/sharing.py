"""Assignment of an expert's rows to ranks, where ranks with few rows share the experts of ranks with many.

Every rank knows how many rows each expert gets from each rank, and so makes the same plan. Sources: exact balance
by replicas (MoonEP), longest first with a threshold and plain expert parallelism where it does not pay (least-loaded
expert parallelism, arXiv:2601.17111). Pure data; the only tensor is the table in which a rank looks up its rows.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ds_npu.parallel.expert.routing import order_by

Pairs = Sequence[Sequence[int]]
"""The rows for each expert, by sending rank: ``pairs[rank][expert]``."""


@dataclass(frozen=True)
class SharedRows:
    """The rows of each expert by the rank along ep that computes them, on the expert itself or on a replica."""

    local: int
    """The number of experts of each rank."""
    rows: tuple[tuple[tuple[int, int], ...], ...]
    """(rank, rows) of each expert, its own rank first; each takes the next rows in the order of sending ranks."""
    spare: int
    """The number of slots for replicas on each rank."""

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The experts of which each rank holds replicas, ascending."""
        ranks = len(self.rows) // self.local
        found: list[list[int]] = [[] for _ in range(ranks)]
        for expert, ((_, _), *others) in enumerate(self.rows):
            for rank, _ in others:
                found[rank].append(expert)
        return tuple(map(tuple, found))

    @property
    def slots(self) -> int:
        """The number of slots of each rank: its experts, then its replicas."""
        return self.local + self.spare

    def slot(self, expert: int, rank: int) -> int:
        """The slot, counted over all ranks, in which ``rank`` holds ``expert``."""
        home, index = divmod(expert, self.local)
        if rank != home:
            index = self.local + self.replicas[rank].index(expert)
        return rank * self.slots + index

    def map_of(self, pairs_RE: Pairs, sender: int) -> torch.Tensor:
        """The table in which ``slots_of_rows`` looks up rows of the rank ``sender``: [E + 1, 1 + 2 J] int64.

        J: the most ranks of an expert. The columns of an expert: the offset from a row's position among this rank's
        rows, sorted by expert, to its position among the expert's rows; the ends of the rows of each of its ranks; its
        slot on each of them. The last line is that of no expert.
        """
        most = max(map(len, self.rows))
        before = itertools.accumulate(pairs_RE[sender], initial=0)
        table = []
        for expert, (parts, own) in enumerate(zip(self.rows, before, strict=False)):
            earlier = sum(each[expert] for each in pairs_RE[:sender])
            stops = list(itertools.accumulate(rows for _, rows in parts))
            slots = [self.slot(expert, rank) for rank, _ in parts]
            missing = most - len(parts)
            table.append([earlier - own, *stops, *[stops[-1]] * missing, *slots, *[-1] * missing])
        return torch.tensor([*table, [0] * (1 + most) + [-1] * most])


def slots_of_rows(ids_TK: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The slot of each row of ``ids`` [T, K], experts of this rank's tokens, by the ``table`` of ``map_of``.

    -1 for no expert. The rows of an expert go to its ranks in the order of tokens.
    """
    experts, most = len(table) - 1, table.shape[1] // 2
    keys = torch.where((ids_TK < 0) | (ids_TK > experts), experts, ids_TK)
    of_row = table.index_select(0, keys.flatten()).view(*keys.shape, table.shape[1])
    position = order_by(keys, 0).positions + of_row[..., 0]
    part = (position.unsqueeze(-1) >= of_row[..., 1 : 1 + most]).sum(-1).clamp(max=most - 1)
    return of_row[..., 1 + most :].gather(-1, part.unsqueeze(-1)).squeeze(-1)


def shared_rows(pairs_RE: Pairs, ranks: int, least: int) -> SharedRows:
    """Assign the rows of each expert to ``ranks`` along ep; each expert's to its own where replicas do not pay.

    The rank with the most rows gives rows of its heaviest expert to the rank with the fewest, until it has no more than
    the mean; then the next rank does. A replica takes ``least`` rows or more; a rank has at most as many replicas as
    experts. Sending one expert is taken to last as long as computing ``least`` rows: replicas pay where the heaviest
    rank's rows fall by ``least`` times the most experts that one rank sends and gets.
    """
    total = [sum(each) for each in zip(*pairs_RE, strict=True)]
    local = len(total) // ranks
    loads = [sum(total[rank * local : (rank + 1) * local]) for rank in range(ranks)]
    target = -(-sum(total) // ranks)
    rows: list[list[tuple[int, int]]] = [[(expert // local, total[expert])] for expert in range(len(total))]
    given = _given(total, loads, target, least)
    after, received, sent = list(loads), [0] * ranks, [0] * ranks
    for (expert, rank), count in sorted(given.items()):
        home = expert // local
        after[home] -= count
        after[rank] += count
        sent[home] += 1
        received[rank] += 1
    traffic = max(map(sum, zip(sent, received, strict=True)))
    if max(loads) - max(after) < least * traffic:
        given = {}
    for (expert, rank), count in sorted(given.items()):
        rows[expert][0] = (expert // local, rows[expert][0][1] - count)
        rows[expert].append((rank, count))
    return SharedRows(local, tuple(map(tuple, rows)), max(received) if given else 0)


def _given(total: Sequence[int], loads: Sequence[int], target: int, least: int) -> dict[tuple[int, int], int]:
    """The rows that a rank computes of another rank's expert, by (expert, rank)."""
    local = len(total) // len(loads)
    given: dict[tuple[int, int], int] = {}
    light = [(load, rank) for rank, load in enumerate(loads) if load < target]
    replicas = [0] * len(loads)
    heapq.heapify(light)
    for source in sorted(range(len(loads)), key=lambda rank: (-loads[rank], rank)):
        surplus = loads[source] - target
        heavy = [(-total[expert], expert) for expert in range(source * local, (source + 1) * local)]
        heapq.heapify(heavy)
        while surplus > 0 and light:
            load, rank = heapq.heappop(light)
            rows, expert = heapq.heappop(heavy)
            count = min(surplus, target - load, -rows)
            if count < least:
                return given
            # Each (expert, rank) comes once: surplus, light rank or expert is used up by ``count``.
            given[expert, rank] = count
            replicas[rank] += 1
            surplus -= count
            heapq.heappush(heavy, (rows + count, expert))
            if load + count < target and replicas[rank] < local:
                heapq.heappush(light, (load + count, rank))
    return given
