"""Messages and buffers of experts whose sizes are known before the counts: no layer waits for the host.

A ``Room`` says how many rows each rank may send to each other, and how many pairs of a row and an expert each rank may
compute. What is left of it is filled up with rows of no expert, which weigh nothing; what does not fit is dropped, and
whoever gave the room has to see that (``need``) and compute again without it. Source: the idea is Megatron-LM's
(paged stashing, expert buffers that are computed again on overflow).

Shape letters as in ``routing``; R ranks, N rows sent, P pairs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch

from ds_npu.comm.collectives import all_gather
from ds_npu.comm.host_copy import copy_to_device
from ds_npu.comm.pending import Pending
from ds_npu.parallel.expert.axis import ExpertAxis
from ds_npu.parallel.expert.dispatch import AllToAll, AllToAllPlan
from ds_npu.parallel.expert.routing import Order, order_by


@dataclass(frozen=True)
class Room:
    """For one call of a layer, the same on every rank."""

    numbers: torch.Tensor
    """int64 on the host: rows from each rank to each [R, R], then pairs of each place along ep, as ``need``."""

    def sent(self, axis: ExpertAxis) -> list[int]:
        """Rows that this rank sends to each."""
        sent: list[int] = self._rows(axis)[axis.rank].tolist()
        return sent

    def received(self, axis: ExpertAxis) -> list[int]:
        """Rows that this rank gets from each."""
        received: list[int] = self._rows(axis)[:, axis.rank].tolist()
        return received

    def pairs(self, axis: ExpertAxis) -> int:
        """Pairs that this rank computes."""
        return int(self.numbers[axis.size**2 + axis.ep_rank])

    def _rows(self, axis: ExpertAxis) -> torch.Tensor:
        return self.numbers[: axis.size**2].view(axis.size, axis.size)


def need(plan: AllToAllPlan) -> Pending[torch.Tensor]:
    """What ``Room.numbers`` have to be at least for ``plan``; on the device, the same on every rank of its axis."""
    axis = plan.axis
    counts = all_gather(plan.counts.unsqueeze(0), 0, axis.group)

    def complete(counts_RC: torch.Tensor) -> torch.Tensor:
        rows_RR, pairs_RE = counts_RC[:, : axis.size], counts_RC[:, axis.size :]
        return torch.cat([rows_RR.flatten(), pairs_RE.view(axis.size, axis.ep, -1).sum((0, 2))])

    return Pending(plan.counts, counts, lambda _: complete(counts.wait()))


class _FilledOrder(Order):
    """An order with rows that only fill up: copies of the last row, or zeros where there is none."""

    def permuted(self, x_NH: torch.Tensor) -> torch.Tensor:
        if not len(x_NH):
            return x_NH.new_zeros(len(self.rows), *x_NH.shape[1:])
        return x_NH.index_select(0, self.rows.clamp(max=len(x_NH) - 1))


@dataclass(frozen=True)
class PresizedPlan:
    """Of ``AllToAll`` in a room: the ranks agree on nothing."""

    plan: AllToAllPlan
    room: Room
    counts: None = None

    @cached_property
    def order(self) -> Order:
        """Rows by rank, as many as there is room for; those that fill up are of the row behind all tokens."""
        axis, keys_TD = self.plan.axis, self.plan.to_ranks
        sent = self.room.sent(axis)
        rows, size = sum(sent), axis.size
        begins = copy_to_device(torch.tensor([0, *itertools.accumulate(sent)]), keys_TD.device)
        ends_R = self.plan.counts[:size].cumsum(0)
        # By rank, how far its rows move from the dense order; those for no rank stand behind all.
        moved = begins - torch.cat([ends_R.new_zeros(1), ends_R])
        place_TD = order_by(keys_TD, keys_TD.numel()).places + moved[keys_TD]
        fits = (keys_TD < size) & (place_TD < begins[1:][keys_TD.clamp(max=size - 1)])
        place_TD = torch.where(fits, place_TD, rows)
        tokens = torch.arange(len(keys_TD), device=keys_TD.device).unsqueeze(1).expand_as(keys_TD)
        filled = keys_TD.new_full((rows + 1,), len(keys_TD))
        filled = filled.scatter_(0, place_TD.flatten(), tokens.flatten())[:rows]
        return _FilledOrder(filled, place_TD.int())

    def prepare(self) -> None:
        self.order  # noqa: B018

    def copies(self, x: torch.Tensor) -> torch.Tensor:
        return self.order.permuted(x)

    def labels(self, routing: torch.Tensor) -> torch.Tensor:
        return self.order.permuted(torch.cat([routing, routing.new_zeros(1, routing.shape[1])]))

    def dispatch(self, counts_RC: list[list[int]]) -> AllToAll:
        axis, room = self.plan.axis, self.room
        sent, received = tuple(room.sent(axis)), tuple(room.received(axis))
        return AllToAll(axis.group, self.order, sent, received, (room.pairs(axis),), fills_up=True)


def in_room(
    counts_E: torch.Tensor, places_NK: torch.Tensor, local_NK: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of ``rows`` pairs in the order of ``local`` [N, K], experts from 0, and behind them some of no expert:

    * how many each expert computes [E], ``rows`` in all: those of no expert are the last one's,
    * places [N, K], behind all others for those of no expert,
    * bool [rows], whether a pair has an expert.
    """
    ends_E = counts_E.cumsum(0).clamp(max=rows)
    computed_E = torch.cat([ends_E[:-1], ends_E.new_full((1,), rows)])
    computed_E = computed_E - torch.cat([ends_E.new_zeros(1), ends_E[:-1]])
    places_NK = torch.where(local_NK < len(counts_E), places_NK, rows)
    return computed_E, places_NK, torch.arange(rows, device=counts_E.device) < ends_E[-1]
