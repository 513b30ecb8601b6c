"""Messages and buffers of experts whose sizes are known before the counts: no layer waits for the host.

``BufferSizes`` limit how many rows each rank sends to each other, and how many pairs of a row and an expert each rank
computes. Unused rows are padding: rows of no expert, with weight 0. Rows that do not fit are dropped; the caller
notices by ``need`` and computes again with exact sizes. Source: the idea is Megatron-LM's (paged stashing, expert
buffers that are computed again on overflow).

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
class BufferSizes:
    """The buffer sizes of one call of a layer, the same on every rank."""

    numbers: torch.Tensor
    """int64 on the host, as from ``need``: rows from each rank to each [R, R], then pairs of each rank along ep."""

    def sent(self, axis: ExpertAxis) -> list[int]:
        """The rows that this rank sends to each rank."""
        sent: list[int] = self._rows(axis)[axis.rank].tolist()
        return sent

    def received(self, axis: ExpertAxis) -> list[int]:
        """The rows that this rank gets from each rank."""
        received: list[int] = self._rows(axis)[:, axis.rank].tolist()
        return received

    def pairs(self, axis: ExpertAxis) -> int:
        """The pairs that this rank computes."""
        return int(self.numbers[axis.size**2 + axis.ep_rank])

    def _rows(self, axis: ExpertAxis) -> torch.Tensor:
        return self.numbers[: axis.size**2].view(axis.size, axis.size)


def need(plan: AllToAllPlan) -> Pending[torch.Tensor]:
    """The smallest ``BufferSizes.numbers`` for ``plan``, on the device; the same on every rank of its axis."""
    axis = plan.axis
    counts = all_gather(plan.counts.unsqueeze(0), 0, axis.group)

    def complete(counts_RC: torch.Tensor) -> torch.Tensor:
        rows_RR = counts_RC[:, : axis.size]
        pairs_RE = counts_RC[:, axis.size :]
        return torch.cat([rows_RR.flatten(), pairs_RE.view(axis.size, axis.ep, -1).sum((0, 2))])

    return Pending(plan.counts, counts, lambda _: complete(counts.wait()))


class _FilledOrder(Order):
    """An order with padding rows: copies of the last row, or zeros where there is none."""

    def permuted(self, x_NH: torch.Tensor) -> torch.Tensor:
        if not len(x_NH):
            return x_NH.new_zeros(len(self.rows), *x_NH.shape[1:])
        return x_NH.index_select(0, self.rows.clamp(max=len(x_NH) - 1))


@dataclass(frozen=True)
class PresizedPlan:
    """The plan of ``AllToAll`` with known buffer sizes; ranks exchange no counts."""

    plan: AllToAllPlan
    sizes: BufferSizes
    counts: None = None

    @cached_property
    def order(self) -> Order:
        """The order of rows by rank, as many as ``sizes`` allow; padding copies the row after the last token."""
        axis, keys_TD = self.plan.axis, self.plan.to_ranks
        sent = self.sizes.sent(axis)
        rows, size = sum(sent), axis.size
        begins = copy_to_device(torch.tensor([0, *itertools.accumulate(sent)]), keys_TD.device)
        ends_R = self.plan.counts[:size].cumsum(0)
        # The shift of each rank's rows from the dense order; rows for no rank come last.
        moved = begins - torch.cat([ends_R.new_zeros(1), ends_R])
        position_TD = order_by(keys_TD, keys_TD.numel()).positions + moved[keys_TD]
        fits = (keys_TD < size) & (position_TD < begins[1:][keys_TD.clamp(max=size - 1)])
        position_TD = torch.where(fits, position_TD, rows)
        tokens = torch.arange(len(keys_TD), device=keys_TD.device).unsqueeze(1).expand_as(keys_TD)
        filled = keys_TD.new_full((rows + 1,), len(keys_TD))
        filled = filled.scatter_(0, position_TD.flatten(), tokens.flatten())[:rows]
        return _FilledOrder(filled, position_TD.int())

    def prepare(self) -> None:
        self.order  # noqa: B018

    def copies(self, x: torch.Tensor) -> torch.Tensor:
        return self.order.permuted(x)

    def labels(self, routing: torch.Tensor) -> torch.Tensor:
        return self.order.permuted(torch.cat([routing, routing.new_zeros(1, routing.shape[1])]))

    def dispatch(self, counts_RC: list[list[int]]) -> AllToAll:
        axis, sizes = self.plan.axis, self.sizes
        sent = tuple(sizes.sent(axis))
        received = tuple(sizes.received(axis))
        return AllToAll(axis.group, self.order, sent, received, (sizes.pairs(axis),), fills_up=True)


def filled_up(
    counts_E: torch.Tensor, positions_NK: torch.Tensor, local_NK: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fill up the pairs of ``local`` [N, K], experts from 0, to ``rows``; pairs of no expert come last. Returns

    * the pairs of each expert [E], ``rows`` in all: the last expert computes those of no expert,
    * the positions [N, K], ``rows`` for pairs of no expert,
    * bool [rows]: whether a pair has an expert.
    """
    ends_E = counts_E.cumsum(0).clamp(max=rows)
    computed_E = torch.cat([ends_E[:-1], ends_E.new_full((1,), rows)])
    computed_E = computed_E - torch.cat([ends_E.new_zeros(1), ends_E[:-1]])
    positions_NK = torch.where(local_NK < len(counts_E), positions_NK, rows)
    return computed_E, positions_NK, torch.arange(rows, device=counts_E.device) < ends_E[-1]
