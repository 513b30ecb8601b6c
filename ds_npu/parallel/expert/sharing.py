"""Assignment of an expert's rows to ranks, where ranks with few rows share the experts of ranks with many.

Every rank knows how many rows each expert gets from each rank, and so makes the same plan. Sources: exact balance
by replicas (MoonEP), longest first with a threshold and plain expert parallelism where it does not pay (least-loaded
expert parallelism, arXiv:2601.17111).

The plan is pure data, but for the table in which a rank looks up its rows. ``Replicas`` follows the plan: it fetches
the weights of experts for one call of a layer, and sends their gradients back.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ds_npu.comm.collectives import all_gather, exchange_rows
from ds_npu.comm.host_copy import HostCopy, copy_to_device
from ds_npu.comm.pending import Pending
from ds_npu.parallel.expert.axis import ExpertAxis
from ds_npu.parallel.expert.dispatch import pairs_of
from ds_npu.parallel.expert.routing import order_by

Pairs = Sequence[Sequence[int]]
"""The rows for each expert, by sending rank: ``pairs[rank][expert]``."""


@dataclass(frozen=True)
class SharedRows:
    """How many rows of each expert each rank along ep computes, with the expert itself or with a replica."""

    local: int
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
    after = list(loads)
    received = [0] * ranks
    sent = [0] * ranks
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
    """How many rows of another rank's expert a rank computes, by (expert, computing rank)."""
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


Optional = torch.Tensor | None
Parameters = Sequence[Optional]
"""Weights and biases of experts; None for a bias that they do not have."""


@dataclass(frozen=True)
class Replicas:
    """The exchange of replicas by ``plan``; every rank of ``axis`` calls the methods at the same time."""

    plan: SharedRows
    axis: ExpertAxis

    def fetch(self, parameters: Parameters) -> Pending[Parameters]:
        """Begin to send ``parameters`` [experts of this rank, ...] to the ranks of their replicas.

        The result is [slots, ...]: this rank's experts, its replicas, and zeros in unused slots.
        """
        begun = [None if each is None else self._fetch(each) for each in parameters]
        return Pending(parameters, None, lambda _: [None if each is None else each.wait() for each in begun])

    def _fetch(self, weight: torch.Tensor) -> Pending[torch.Tensor]:
        leaving = [weight[index : index + 1] for _, index in self._leaving]
        arriving = exchange_rows(
            torch.cat(leaving) if leaving else weight.new_empty(0, *weight.shape[1:]),
            self._counts([rank for rank, _ in self._leaving]),
            self._counts(self._homes),
            self.axis.group,
        )
        missing = self.plan.slots - len(weight) - len(self._homes)

        def complete(own: torch.Tensor) -> torch.Tensor:
            return torch.cat([own, arriving.wait(), own.new_zeros(missing, *own.shape[1:])])

        return Pending(weight, arriving, complete)

    def gather_gradient(self, gradient: torch.Tensor) -> Pending[torch.Tensor]:
        """Add to this rank's experts in ``gradient`` [slots, ...] the gradients of their replicas on other ranks."""
        local = self.plan.local
        mine = gradient[local : local + len(self._homes)]
        sent = self._counts(self._homes)
        received = self._counts([rank for rank, _ in self._leaving])
        arriving = exchange_rows(mine, sent, received, self.axis.group)

        def add(own: torch.Tensor) -> torch.Tensor:
            for (_, index), each in zip(self._leaving, arriving.wait(), strict=True):
                own[index] += each
            return own

        return Pending(gradient[:local], arriving, add)

    @property
    def _leaving(self) -> list[tuple[int, int]]:
        """(target rank along ep, the expert's index here) of each replica of this rank's experts, as they are sent."""
        first = self.axis.ep_rank * self.plan.local
        experts = range(first, first + self.plan.local)
        return [
            (rank, expert - first)
            for rank, held in enumerate(self.plan.replicas)
            for expert in held
            if expert in experts
        ]

    @property
    def _homes(self) -> list[int]:
        """The rank along ep that owns the expert of each replica on this rank."""
        return [expert // self.plan.local for expert in self.plan.replicas[self.axis.ep_rank]]

    def _counts(self, ranks: list[int]) -> list[int]:
        """How often each rank of the axis is in ``ranks``: ranks along ep, at this rank's index along etp."""
        counts = [0] * self.axis.size
        for rank in ranks:
            counts[rank * self.axis.etp + self.axis.etp_rank] += 1
        return counts


def shared_over_ranks(
    all_ids: Sequence[torch.Tensor], experts: int, axis: ExpertAxis, least: int
) -> tuple[list[torch.Tensor], list[Replicas | None]]:
    """Share the rows of experts evenly in each piece of the tokens, whose experts are ``all_ids`` [T, K].

    Returns, for each piece, the slots [T, K] of the experts, and the replicas; ``all_ids`` and None where there are no
    replicas. Every rank of ``axis`` calls it at the same time. ``least``: as in ``shared_rows``.
    """
    counts = all_gather(torch.stack([pairs_of(ids, experts) for ids in all_ids]), 0, axis.group).wait()
    # The host waits for the counts, by which it makes the plan.
    pairs_PRE = HostCopy(counts.view(axis.size, len(all_ids), experts)).read().transpose(0, 1).tolist()
    plans = [shared_rows(pairs_RE, axis.ep, least) for pairs_RE in pairs_PRE]
    spare = max(plan.spare for plan in plans)
    if not spare:
        return list(all_ids), [None] * len(plans)
    plans = [dataclasses.replace(plan, spare=spare) for plan in plans]
    slots = [
        slots_of_rows(ids, copy_to_device(plan.map_of(pairs_RE, axis.rank), ids.device))
        for ids, plan, pairs_RE in zip(all_ids, plans, pairs_PRE, strict=True)
    ]
    return slots, [Replicas(plan, axis) for plan in plans]


def gathered_gradients(replicas: Replicas | None, gradients: Parameters) -> Parameters:
    """The gradients of this rank's experts, with those of their replicas on other ranks."""
    if replicas is None:
        return gradients
    begun = [None if each is None else replicas.gather_gradient(each) for each in gradients]
    return [None if each is None else each.wait() for each in begun]
