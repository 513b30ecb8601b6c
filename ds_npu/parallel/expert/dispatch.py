"""Tokens to the ranks of their experts and back: what each dispatcher sends, as two adjoint linear maps.

``send`` copies tokens [T, ...] to rows [N, ...] on other ranks, ``combine`` sums rows back into tokens. Each is the
gradient of the other. A token goes once to a rank, however many of its experts are there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from ds_npu.comm.collectives import all_gather, exchange_rows, reduce_scatter
from ds_npu.comm.pending import Pending
from ds_npu.ops.token_permutation import token_unpermute
from ds_npu.parallel.expert.axis import ExpertAxis
from ds_npu.parallel.expert.routing import Order, destinations, histogram, order_by


class Dispatch(Protocol):
    """The ways of one micro-batch's tokens through one layer."""

    @property
    def pairs_of_experts(self) -> tuple[int, ...]:
        """How many rows each expert of this rank gets."""

    def send(self, x: torch.Tensor) -> Pending[torch.Tensor]:
        """Rows [N, ...] of this rank's experts from tokens [T, ...] of all ranks."""

    def combine(self, rows: torch.Tensor) -> Pending[torch.Tensor]:
        """The sum over ranks [T, ...] of the rows [N, ...] that each token was sent as."""


@dataclass(frozen=True)
class AllToAll:
    """Each token to the ranks of its experts, in messages of uneven sizes."""

    group: dist.ProcessGroup
    order: Order
    """Of the rows that are sent, by rank."""
    sent: tuple[int, ...]
    received: tuple[int, ...]
    """Rows to and from each rank."""
    pairs_of_experts: tuple[int, ...]

    def send(self, x: torch.Tensor) -> Pending[torch.Tensor]:
        return exchange_rows(self.order.permuted(x), self.sent, self.received, self.group)

    def combine(self, rows: torch.Tensor) -> Pending[torch.Tensor]:
        back = exchange_rows(rows, self.received, self.sent, self.group)
        return Pending(rows, back, lambda _: token_unpermute(back.wait(), self.order.places))


@dataclass(frozen=True)
class AllGather:
    """All tokens of all ranks to every rank; each computes what its experts are to."""

    group: dist.ProcessGroup
    tokens: int
    """Of this rank."""
    most_tokens: int
    """Of any rank: the others' are followed by zeros."""
    pairs_of_experts: tuple[int, ...]

    def send(self, x: torch.Tensor) -> Pending[torch.Tensor]:
        return all_gather(self._padded(x), 0, self.group)

    def combine(self, rows: torch.Tensor) -> Pending[torch.Tensor]:
        summed = reduce_scatter(rows, 0, self.group)
        return Pending(rows, summed, lambda _: summed.wait()[: self.tokens])

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        missing = self.most_tokens - self.tokens
        return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def all_to_all(ids_TK: torch.Tensor, experts: int, axis: ExpertAxis) -> AllToAll:
    """Agree with the other ranks of ``axis`` on what is sent; the host waits once, for all counts.

    ids: [T, K] int64, the experts of each token; -1 for none.
    """
    to_TD = destinations(ids_TK, experts, axis.ep, axis.etp)
    mine = torch.cat([histogram(to_TD, axis.size), _pairs(ids_TK, experts)])
    counts = _of_all_ranks(mine, axis)
    sent = counts[axis.rank][: axis.size]
    return AllToAll(
        axis.group,
        order_by(to_TD, sum(sent)),
        tuple(sent),
        tuple(each[axis.rank] for each in counts),
        _of_this_rank([each[axis.size :] for each in counts], axis),
    )


def all_gathered(ids_TK: torch.Tensor, experts: int, axis: ExpertAxis) -> AllGather:
    """As ``all_to_all``, for the dispatcher that sends every token to every rank."""
    mine = torch.cat([ids_TK.new_tensor([len(ids_TK)]), _pairs(ids_TK, experts)])
    counts = _of_all_ranks(mine, axis)
    most = max(each[0] for each in counts)
    return AllGather(axis.group, len(ids_TK), most, _of_this_rank([each[1:] for each in counts], axis))


def _pairs(ids_TK: torch.Tensor, experts: int) -> torch.Tensor:
    return histogram(torch.where(ids_TK < 0, experts, ids_TK), experts)


def _of_all_ranks(mine: torch.Tensor, axis: ExpertAxis) -> list[list[int]]:
    # The host needs them: they are the sizes of messages and tensors.
    gathered = all_gather(mine, 0, axis.group).wait()
    found: list[list[int]] = gathered.view(axis.size, -1).tolist()
    return found


def _of_this_rank(pairs_RE: list[list[int]], axis: ExpertAxis) -> tuple[int, ...]:
    """How many rows each of this rank's experts gets from all ranks."""
    local = len(pairs_RE[0]) // axis.ep
    first = axis.ep_rank * local
    return tuple(map(sum, zip(*(each[first : first + local] for each in pairs_RE), strict=True)))


DISPATCHERS: dict[str, Callable[[torch.Tensor, int, ExpertAxis], Dispatch]] = {
    "alltoall": all_to_all,
    "allgather": all_gathered,
}
"""By the values of ``ds_npu.moe.dispatcher``."""
