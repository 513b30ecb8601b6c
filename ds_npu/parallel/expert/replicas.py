"""Replicas of experts on other ranks, for one call of a layer: weights are fetched, gradients sent back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_npu.comm.collectives import all_gather, exchange_rows
from ds_npu.comm.host_copy import HostCopy, copy_to_device
from ds_npu.comm.pending import Pending
from ds_npu.parallel.expert.axis import ExpertAxis
from ds_npu.parallel.expert.dispatch import pairs_of
from ds_npu.parallel.expert.sharing import SharedRows, shared_rows, slots_of_rows

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
        sent, received = self._counts(self._homes), self._counts([rank for rank, _ in self._leaving])
        arriving = exchange_rows(mine, sent, received, self.axis.group)

        def add(own: torch.Tensor) -> torch.Tensor:
            for (_, index), each in zip(self._leaving, arriving.wait(), strict=True):
                own[index] += each
            return own

        return Pending(gradient[:local], arriving, add)

    @property
    def _leaving(self) -> list[tuple[int, int]]:
        """(rank along ep, index on this rank) of each replica of this rank's experts, in the order of sending."""
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
        """How often each rank of the axis is in ``ranks`` along ep, which stand for those of this rank's etp."""
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
