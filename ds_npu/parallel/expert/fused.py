"""Experts whose products are fused with the all-to-alls of their rows, in one kernel each.

A token is sent once for each of its experts, and not once to each rank as by other dispatchers: the kernels know rows
of experts only. Where the kernels do not take a layer or a micro-batch, another dispatcher computes it, and a warning
says why. Source: MindSpeed (moe-alltoall-mc2).

Shape letters as in ``routing`` and in ``ops.npu.matmul_collective``; S rows sent, one for each choice of a token.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch.autograd.function import once_differentiable

from ds_npu.comm.collectives import exchange_rows
from ds_npu.comm.communicator import communicator
from ds_npu.comm.host_copy import copy_to_device
from ds_npu.config.moe import ABILITIES, Dispatching
from ds_npu.log import warn_once
from ds_npu.ops import expert_exchange
from ds_npu.ops.autograd import Context, applied
from ds_npu.ops.operator import npu_kernels
from ds_npu.ops.token_permutation import token_unpermute
from ds_npu.parallel.expert.axis import ExpertAxis
from ds_npu.parallel.expert.dispatch import Agreement, AllToAllPlan, Dispatcher, ExpertOptions, Piece, Routed
from ds_npu.parallel.expert.routing import Order, order_by, weighted
from ds_npu.parallel.expert.sharing import Optional
from ds_npu.parallel.expert.weights import ExpertWeights

Counts = Sequence[int]


class Kernels(Protocol):
    """``ds_npu.ops.npu.matmul_collective``, which can be imported only where torch_npu can."""

    def alltoall_matmul(
        self, x_SK: torch.Tensor, weight_EKN: torch.Tensor, communicator: str, sent: Counts, received: Counts
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def matmul_alltoall(
        self, x_PK: torch.Tensor, weight_EKN: torch.Tensor, communicator: str, sent: Counts, received: Counts
    ) -> torch.Tensor: ...


@functools.cache
def exchange_kernels() -> Kernels:
    """The kernels of torch_npu."""
    kernels: Kernels = npu_kernels("ds_npu.ops.npu.matmul_collective")
    return kernels


@dataclass(frozen=True)
class FusedDispatcher:
    """A dispatcher that runs products and their messages in one kernel.

    Where the kernels do not apply, the ``fallback`` dispatches, with a warning.
    """

    fallback: Dispatcher
    can: ClassVar[Dispatching] = ABILITIES["fused"]

    def unavailable(self) -> object:
        return expert_exchange.why_not_fused()

    def send(
        self, pieces: Sequence[Piece], experts: ExpertWeights, axis: ExpertAxis, options: ExpertOptions
    ) -> Sequence[Routed]:
        """Compute the one piece completely."""
        ((x_TH, ids_TK, weights_TK),) = pieces
        reason = _unmet(x_TH, experts, axis)
        if reason is None:
            agreement = Agreement([AllToAllPlan.of(ids_TK, len(experts) * axis.ep, axis)], axis)
            pairs_RE = [counts[axis.size :] for counts in agreement.counts[0]]
            reason = expert_exchange.unmet_bytes(_bytes(pairs_RE, axis, x_TH))
        if reason is not None:
            warn_once(f"moe.dispatcher: experts are dispatched by alltoall, not fused: {reason}")
            return self.fallback.send(pieces, experts, axis, options)
        exchange = _Exchange.of(pairs_RE, ids_TK, experts, axis)
        return [Routed(_fused(x_TH, weights_TK, exchange, experts.up, experts.down))]


def _unmet(x: torch.Tensor, experts: ExpertWeights, axis: ExpertAxis) -> str | None:
    if experts.up_bias is not None or experts.down_bias is not None:
        return "the experts have biases, which the kernels do not add"
    if experts.product is not None:
        return "the experts have a kind of product that the kernels do not compute"
    dtypes = frozenset({x.dtype, experts.up.dtype, experts.down.dtype})
    widths = max(experts.up.shape[1:]), max(experts.down.shape[1:])
    return expert_exchange.unmet(x.device.type, dtypes, widths, len(experts), axis.size)


def _bytes(pairs_RE: list[list[int]], axis: ExpertAxis, x_TH: torch.Tensor) -> list[int]:
    """The bytes that each rank sends, then the bytes that each rank along ep gets."""
    local = len(pairs_RE[0]) // axis.ep
    size = x_TH.shape[1] * x_TH.element_size()
    columns = [sum(each) for each in zip(*pairs_RE, strict=True)]
    received = [sum(columns[rank * local : (rank + 1) * local]) for rank in range(axis.ep)]
    return [rows * size for rows in (*map(sum, pairs_RE), *received)]


@dataclass(frozen=True)
class _Exchange:
    """The exchange of one micro-batch's rows in one layer."""

    experts: ExpertWeights
    axis: ExpertAxis
    order: Order
    choices: torch.Tensor
    """[S] int64: the index of each sent row's choice among all T * K."""
    sent: tuple[int, ...]
    received: tuple[int, ...]
    by_expert: Order
    """The order of received rows by expert; they arrive by rank, then expert."""
    counts: torch.Tensor
    """[E] int64: the rows of each expert of this rank."""

    @staticmethod
    def of(pairs_RE: list[list[int]], ids_TK: torch.Tensor, experts: ExpertWeights, axis: ExpertAxis) -> _Exchange:
        """The exchange for the counts of all ranks, which are on the host; nothing waits for the device."""
        local, device = len(experts), ids_TK.device
        mine = slice(axis.ep_rank * local, (axis.ep_rank + 1) * local)
        sent = pairs_RE[axis.rank]
        received_RE = torch.tensor([each[mine] for each in pairs_RE])
        count = local * axis.ep
        keys_TK = torch.where((ids_TK >= 0) & (ids_TK < count), ids_TK, count)
        choices = order_by(keys_TK.view(-1, 1), sum(sent))
        order = Order(choices.rows // ids_TK.shape[1], choices.positions.view_as(ids_TK))
        numbers = torch.arange(local).repeat(axis.ep).repeat_interleave(received_RE.flatten())
        by_expert = order_by(copy_to_device(numbers, device).unsqueeze(1), len(numbers))
        counts = copy_to_device(received_RE.sum(0), device)
        received = tuple(received_RE.flatten().tolist())
        return _Exchange(experts, axis, order, choices.rows, tuple(sent), received, by_expert, counts)

    def multiplied(self, x_SK: torch.Tensor, weight_EKN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The products [P, N] of the received rows, and the received rows [P, K]."""
        name = communicator(self.axis.group)
        return exchange_kernels().alltoall_matmul(x_SK, weight_EKN, name, self.sent, self.received)

    def returned(self, x_PK: torch.Tensor, weight_EKN: torch.Tensor) -> torch.Tensor:
        """The products [S, N] of this rank's rows, which other ranks' experts computed."""
        name = communicator(self.axis.group)
        return exchange_kernels().matmul_alltoall(x_PK, weight_EKN, name, self.sent, self.received)

    def exchanged(self, values_S: torch.Tensor) -> torch.Tensor:
        """Send one number [S] of each row to the rank of its expert: [P]."""
        of_ranks = self._of_ranks
        arrived = exchange_rows(values_S, of_ranks[0], of_ranks[1], self.axis.group).wait()
        return self.by_expert.permuted(arrived)

    def exchanged_back(self, values_P: torch.Tensor) -> torch.Tensor:
        """Send one number [P] of each row back to its token's choice: [T, K]; 0 for choices of no expert."""
        of_ranks = self._of_ranks
        leaving = self.by_expert.unpermuted(values_P).flatten()
        return self.order.unpermuted(exchange_rows(leaving, of_ranks[1], of_ranks[0], self.axis.group).wait())

    @property
    def _of_ranks(self) -> list[list[int]]:
        """The rows sent to each rank, and received from each."""
        local = len(self.experts)
        return [
            [sum(counts[begin : begin + local]) for begin in range(0, len(counts), local)]
            for counts in (self.sent, self.received)
        ]


class _FusedContext(Context):
    exchange: _Exchange


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _FusedContext,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        exchange: _Exchange,
        up: torch.Tensor,
        down: torch.Tensor,
    ) -> torch.Tensor:
        experts = exchange.experts
        wide = torch.promote_types(weights_TK.dtype, torch.float32)
        weights_P = exchange.exchanged(weights_TK.to(wide).flatten().index_select(0, exchange.choices))
        first_PF, rows_PH = exchange.multiplied(
            exchange.order.permuted(x_TH), up if experts.is_transposed else up.transpose(1, 2)
        )
        weighted_PI = weighted(experts.activation(first_PF), weights_P)
        y_SH = exchange.returned(weighted_PI, down if experts.is_transposed else down.transpose(1, 2))
        ctx.exchange = exchange
        ctx.save_for_backward(rows_PH, first_PF, weights_P, up, down)
        return token_unpermute(y_SH, exchange.order.positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: _FusedContext, dout_TH: torch.Tensor) -> tuple[Optional, ...]:
        exchange = ctx.exchange
        rows_PH, first_PF, weights_P, up, down = ctx.saved_tensors
        experts = exchange.experts
        dweighted_PI, dy_PH = exchange.multiplied(
            exchange.order.permuted(dout_TH), down.transpose(1, 2) if experts.is_transposed else down
        )
        with torch.enable_grad():
            first_PF = first_PF.detach().requires_grad_()
            activated_PI = experts.activation(first_PF)
        (dfirst_PF,) = torch.autograd.grad(activated_PI, first_PF, weighted(dweighted_PI, weights_P))
        activated_PI = activated_PI.detach()
        dx_SH = exchange.returned(dfirst_PF, up.transpose(1, 2) if experts.is_transposed else up)
        dx_TH = token_unpermute(dx_SH, exchange.order.positions)
        dweights_P = (activated_PI.to(weights_P.dtype) * dweighted_PI).sum(1)
        dweights_TK = exchange.exchanged_back(dweights_P)
        dup = ddown = None
        if ctx.needs_input_grad[3]:
            dup = experts.gradient_of(up, rows_PH, dfirst_PF, exchange.counts)
        if ctx.needs_input_grad[4]:
            ddown = experts.gradient_of(down, weighted(activated_PI, weights_P), dy_PH, exchange.counts)
        return dx_TH, dweights_TK, None, dup, ddown


_fused = applied(_Fused, _Fused.forward)
