"""Dispatch of tokens to the ranks of their experts, and combine: two adjoint linear maps for each dispatcher.

``send`` copies tokens [T, ...] to rows [N, ...] on other ranks, ``combine`` sums rows back into tokens. Each is the
gradient of the other. A token goes once to a rank, however many of its experts are there.

The sizes of messages are known when the counts of all ranks have reached the host. The ``Plan`` of a dispatch, which
does not need them, is computed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from ds_npu.comm.collectives import all_gather, exchange_rows, reduce_scatter
from ds_npu.comm.host_copy import HostCopy
from ds_npu.comm.pending import Pending
from ds_npu.config.moe import Dispatching
from ds_npu.ops.token_permutation import token_unpermute
from ds_npu.parallel.expert.axis import ExpertAxis
from ds_npu.parallel.expert.routing import Order, destinations, histogram, order_by
from ds_npu.parallel.expert.weights import ExpertWeights

Piece = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""x [T, H], ids [T, K] and weights [T, K] of this rank's tokens, or of a part of them."""
ZeroMemory = Literal["none", "level0", "level1"]


@dataclass(frozen=True)
class ExpertOptions:
    """The choice of dispatcher, and what backward computes again."""

    dispatcher: str = "alltoall"
    zero_memory: ZeroMemory = "none"
    replica_rows: int = 0
    """The fewest rows for which an expert gets a replica on another rank (``sharing``); 0: no replicas."""
    presize: Callable[[Sequence[Any]], Sequence[Plan]] | None = None
    """Replaces the plans of all pieces by plans of preset sizes (``presized``); None: the counts give the sizes."""


class Routed:
    """Tokens that are dispatched and combined; in this base class the sums [T, H] are known already.

    Computation between two calls overlaps with their messages, in forward and in backward. Every rank of the axis calls
    each method once, in the same order.
    """

    def __init__(self, sums: torch.Tensor) -> None:
        self._sums = sums

    def compute(self) -> None:
        """Wait for the tokens, compute, and send the sums back."""

    def finish(self) -> torch.Tensor:
        """Wait for the sums."""
        return self._sums


class Dispatcher(Protocol):
    """An implementation of dispatch, expert computation and combine, as ``register_dispatcher`` takes it."""

    @property
    def can(self) -> Dispatching:
        """Its abilities."""

    def unavailable(self) -> object:
        """The reason why it does not run on this machine; None where it does."""

    def send(
        self, pieces: Sequence[Piece], experts: ExpertWeights, axis: ExpertAxis, options: ExpertOptions
    ) -> Sequence[Routed]:
        """Send the tokens of each piece to their experts; all ranks have the same number of pieces."""


class Dispatch(Protocol):
    """The dispatch of one micro-batch's tokens in one layer."""

    @property
    def pairs_of_experts(self) -> tuple[int, ...]:
        """The number of rows that each expert of this rank gets."""

    @property
    def fills_up(self) -> bool:
        """Whether rows include padding of no expert, so that only the total of ``pairs_of_experts`` is known."""

    def send(self, x: torch.Tensor) -> Pending[torch.Tensor]:
        """Rows [N, ...] of this rank's experts from tokens [T, ...] of all ranks."""

    def send_copies(self, copies: torch.Tensor) -> Pending[torch.Tensor]:
        """As ``send``, given the ``Plan.copies`` of the tokens."""

    def combine(self, rows: torch.Tensor) -> Pending[torch.Tensor]:
        """For each token the sum [T, ...], over ranks, of the rows [N, ...] that are its copies."""


class Plan(Protocol):
    """The part of a dispatch that a rank knows before it has the counts of other ranks."""

    @property
    def counts(self) -> torch.Tensor | None:
        """[C] int64, the same C on each rank: numbers that other ranks need. None where all sizes are known."""

    def prepare(self) -> None:
        """Compute what ``dispatch`` needs besides the counts of all ranks."""

    def copies(self, x: torch.Tensor) -> torch.Tensor:
        """The copies of tokens [T, ...] in the order of sending; more rows may follow them."""

    def labels(self, routing: torch.Tensor) -> torch.Tensor:
        """As ``copies``, for the routing numbers [T, L] of the tokens; padding rows get 0."""

    def dispatch(self, counts_RC: list[list[int]]) -> Dispatch:
        """The dispatch, given the counts of all ranks."""


@dataclass(frozen=True)
class AllToAll:
    """Sends each token to the ranks of its experts, in messages of uneven sizes."""

    group: dist.ProcessGroup
    order: Order
    sent: tuple[int, ...]
    received: tuple[int, ...]
    """The numbers of rows sent to each rank, and received from it."""
    pairs_of_experts: tuple[int, ...]
    fills_up: bool = False

    def send(self, x: torch.Tensor) -> Pending[torch.Tensor]:
        return exchange_rows(self.order.permuted(x), self.sent, self.received, self.group)

    def send_copies(self, copies: torch.Tensor) -> Pending[torch.Tensor]:
        return exchange_rows(copies[: sum(self.sent)], self.sent, self.received, self.group)

    def combine(self, rows: torch.Tensor) -> Pending[torch.Tensor]:
        back = exchange_rows(rows, self.received, self.sent, self.group)
        return Pending(rows, back, lambda _: token_unpermute(back.wait(), self.order.positions))


@dataclass(frozen=True)
class AllToAllPlan:
    """The plan of ``AllToAll``."""

    axis: ExpertAxis
    to_ranks: torch.Tensor
    """[T, D] int64: the ranks that each token goes to."""
    counts: torch.Tensor
    """The rows to each rank, then the pairs of each expert."""

    @staticmethod
    def of(ids_TK: torch.Tensor, experts: int, axis: ExpertAxis) -> AllToAllPlan:
        """ids: [T, K] int64, the experts of each token; -1 for none."""
        to_TD = destinations(ids_TK, experts, axis.ep, axis.etp)
        return AllToAllPlan(axis, to_TD, torch.cat([histogram(to_TD, axis.size), pairs_of(ids_TK, experts)]))

    @cached_property
    def order(self) -> Order:
        """The order of rows by rank; rows for no rank come last."""
        return order_by(self.to_ranks, self.to_ranks.numel())

    def prepare(self) -> None:
        self.order  # noqa: B018

    def copies(self, x: torch.Tensor) -> torch.Tensor:
        return self.order.permuted(x)

    labels = copies

    def dispatch(self, counts_RC: list[list[int]]) -> AllToAll:
        rank, size = self.axis.rank, self.axis.size
        sent = counts_RC[rank][:size]
        return AllToAll(
            self.axis.group,
            Order(self.order.rows[: sum(sent)], self.order.positions),
            tuple(sent),
            tuple(each[rank] for each in counts_RC),
            _of_this_rank([each[size:] for each in counts_RC], self.axis),
        )


@dataclass(frozen=True)
class AllGather:
    """Gathers the tokens of all ranks on every rank, which computes those of its experts."""

    group: dist.ProcessGroup
    tokens: int
    most_tokens: int
    """The most tokens of any rank; ranks with fewer pad with zeros."""
    pairs_of_experts: tuple[int, ...]
    fills_up: bool = False

    def send(self, x: torch.Tensor) -> Pending[torch.Tensor]:
        missing = self.most_tokens - self.tokens
        padded = torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x
        gathered = all_gather(padded, 0, self.group)
        # Autograd adds to a gradient in place unless another reference exists; hold one until it has been sent.
        return Pending(padded, gathered, lambda _: gathered.wait())

    send_copies = send

    def combine(self, rows: torch.Tensor) -> Pending[torch.Tensor]:
        summed = reduce_scatter(rows, 0, self.group)
        return Pending(rows, summed, lambda _: summed.wait()[: self.tokens])


@dataclass(frozen=True)
class AllGatherPlan:
    """The plan of ``AllGather``: every token goes to every rank."""

    axis: ExpertAxis
    tokens: int
    counts: torch.Tensor
    """The number of tokens, then the pairs of each expert."""

    @staticmethod
    def of(ids_TK: torch.Tensor, experts: int, axis: ExpertAxis) -> AllGatherPlan:
        """ids: [T, K] int64, the experts of each token; -1 for none."""
        counts = torch.cat([ids_TK.new_tensor([len(ids_TK)]), pairs_of(ids_TK, experts)])
        return AllGatherPlan(axis, len(ids_TK), counts)

    def prepare(self) -> None:
        return

    def copies(self, x: torch.Tensor) -> torch.Tensor:
        return x

    labels = copies

    def dispatch(self, counts_RC: list[list[int]]) -> AllGather:
        most = max(each[0] for each in counts_RC)
        pairs = _of_this_rank([each[1:] for each in counts_RC], self.axis)
        return AllGather(self.axis.group, self.tokens, most, pairs)


@dataclass(frozen=True)
class EvenPlan:
    """The plan of ``AllToAll`` where every rank has equally many rows for each expert: all sizes are known.

    The ranks agree on nothing, and the host waits for nothing.
    """

    axis: ExpertAxis
    to_ranks: torch.Tensor
    """[T, D] int64: the ranks that each row goes to."""
    each: int
    """Rows of this rank for each expert."""
    local: int
    """Experts of a rank along ep."""
    counts: None = None

    @staticmethod
    def of(ids_TK: torch.Tensor, experts: int, axis: ExpertAxis) -> EvenPlan:
        """ids: [T, 1] int64, of which every rank of ``axis`` has equally many for each expert."""
        to_TD = destinations(ids_TK, experts, axis.ep, axis.etp)
        return EvenPlan(axis, to_TD, len(ids_TK) // experts, experts // axis.ep)

    @cached_property
    def order(self) -> Order:
        """The rows by rank."""
        return order_by(self.to_ranks, self.each * self.local * self.axis.size)

    def prepare(self) -> None:
        return

    def copies(self, x: torch.Tensor) -> torch.Tensor:
        return self.order.permuted(x)

    labels = copies

    def dispatch(self, counts_RC: list[list[int]]) -> AllToAll:
        rows = (self.local * self.each,) * self.axis.size
        return AllToAll(self.axis.group, self.order, rows, rows, (self.axis.size * self.each,) * self.local)


class Agreement:
    """The dispatches of ``plans``, after one message of counts between the ranks of ``axis`` and one wait of the host.

    Where sizes are known there is neither. Every rank of the axis makes it at the same time, with as many plans. The
    host waits at the first use of ``dispatches``, or of ``counts``.
    """

    def __init__(self, plans: Sequence[Plan], axis: ExpertAxis) -> None:
        self.plans = plans
        self._copy: HostCopy | None = None
        mine = [plan.counts for plan in plans if plan.counts is not None]
        counts = all_gather(torch.stack(mine), 0, axis.group) if mine else None
        for plan in plans:
            plan.prepare()
        if counts is not None:
            self._copy = HostCopy(counts.wait().view(axis.size, len(plans), -1))

    @cached_property
    def counts(self) -> list[list[list[int]]]:
        """The counts of each plan and rank; empty where sizes are known."""
        if self._copy is None:
            return [[] for _ in self.plans]
        # The host needs the counts: they are the sizes of messages and tensors.
        counts_PRC: list[list[list[int]]] = self._copy.read().transpose(0, 1).tolist()
        return counts_PRC

    @cached_property
    def dispatches(self) -> list[Dispatch]:
        """The dispatch of each plan."""
        return [plan.dispatch(each) for plan, each in zip(self.plans, self.counts, strict=True)]


def pairs_of(ids_TK: torch.Tensor, experts: int) -> torch.Tensor:
    """[E] int64: how many of this rank's tokens chose each expert."""
    return histogram(torch.where(ids_TK < 0, experts, ids_TK), experts)


def _of_this_rank(pairs_RE: list[list[int]], axis: ExpertAxis) -> tuple[int, ...]:
    """How many rows each of this rank's experts gets from all ranks."""
    local = len(pairs_RE[0]) // axis.ep
    first = axis.ep_rank * local
    return tuple(map(sum, zip(*(each[first : first + local] for each in pairs_RE), strict=True)))
