"""The experts of a mixture-of-experts layer over the ranks of an expert axis: dispatch, compute, combine.

Three autograd nodes, of which the one in the middle computes and the others send or wait. Computation between them
overlaps with the messages, in forward and backward. In backward the gradients of tokens and routing weights are sent
before weight gradients are computed. The ``zero_memory`` level says what is kept for backward:

    none     the received tokens, and the output of the first product
    level0   the output of the first product; tokens are sent again
    level1   only the layer's input; the first product is computed again, too

Each level computes the activation again and applies routing weights to it, so that their gradient does not need the
outputs of the experts. Sources: Megatron-LM's grouped MoE (probabilities applied before the second product); for
zero-memory MindSpeed (docs/zh/features/megatron_moe/megatron-moe-zero-memory.md), whose names the levels have.

Shape letters as in ``routing``; H hidden, F outputs of the first product, I inputs of the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.autograd.function import once_differentiable

from ds_npu.comm.pending import InFlight
from ds_npu.config.moe import ABILITIES, Dispatching
from ds_npu.ops.autograd import Context, applied
from ds_npu.ops.token_permutation import token_permute, token_unpermute
from ds_npu.parallel.expert.axis import ExpertAxis
from ds_npu.parallel.expert.dispatch import (
    Agreement,
    AllGatherPlan,
    AllToAllPlan,
    Dispatch,
    Dispatcher,
    EvenPlan,
    ExpertOptions,
    Piece,
    Plan,
    Routed,
    ZeroMemory,
)
from ds_npu.parallel.expert.fused import FusedDispatcher
from ds_npu.parallel.expert.presized import filled_up
from ds_npu.parallel.expert.routing import Order, histogram, inverse, local_ids, weighted
from ds_npu.parallel.expert.sharing import Optional, Parameters, Replicas, gathered_gradients, shared_over_ranks
from ds_npu.parallel.expert.weights import ExpertWeights
from ds_npu.parallel.runtime.micro_batch import is_in_backward
from ds_npu.parallel.runtime.paired_passes import PairedPass, PassKind, running_pass


def compute_experts(
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    experts: ExpertWeights,
    axis: ExpertAxis,
    options: ExpertOptions,
) -> torch.Tensor:
    """For each token the sum [T, H] of its experts' outputs, each times its routing weight.

    x: [T, H], this rank's tokens (with ``axis.same_tokens``: its share of them); ids: [T, K] int64, experts of all
    ranks, -1 for none; weights: [T, K] floating. Every rank of the axis calls it at the same time, with any T. It is
    not differentiable twice.
    """
    (routed,) = DISPATCHERS[options.dispatcher].send([(x_TH, ids_TK, weights_TK)], experts, axis, options)
    routed.compute()
    return routed.finish()


class RoutedTokens(Routed):
    """Tokens dispatched by three autograd nodes, of which autograd runs the youngest that is ready."""

    def __init__(self, x_TH: torch.Tensor, weights_TK: torch.Tensor, call: _Call) -> None:
        self._call, self._x = call, x_TH.detach()
        self._link = _send(x_TH, weights_TK, call)

    def compute(self) -> None:
        self._call.paired_pass.hand_over(PassKind.FORWARD)
        self._link = _compute(self._link, self._call, *self._call.parameters)
        if not is_in_backward():
            self._call.send_sums()

    def finish(self) -> torch.Tensor:
        # A recomputation that ends behind the last saved tensor needs no sums, and nobody would wait for them.
        if is_in_backward():
            self._call.send_sums()
        self._call.paired_pass.hand_over(PassKind.FORWARD)
        return _finish(self._link, None if self._call.zero_memory == "none" else self._x, self._call)


@dataclass(frozen=True)
class Planned:
    """A dispatcher that makes a ``Plan`` for each piece of the tokens.

    Other layers may compute while its messages travel.
    """

    can: Dispatching
    plan: Callable[[torch.Tensor, int, ExpertAxis], Plan]
    """Makes the plan for the experts [T, K] of each token (-1 for none), given their number and axis."""

    def unavailable(self) -> None:
        return None

    def send(
        self, pieces: Sequence[Piece], experts: ExpertWeights, axis: ExpertAxis, options: ExpertOptions
    ) -> list[RoutedTokens]:
        """Send all pieces; the host waits once."""
        all_ids = [ids for _, ids, _ in pieces]
        count = len(experts)
        replicas: Sequence[Replicas | None] = [None] * len(pieces)
        if options.replica_rows:
            all_ids, replicas = shared_over_ranks(all_ids, count * axis.ep, axis, options.replica_rows)
            count = max(count if each is None else each.plan.slots for each in replicas)
        plans = [self.plan(ids, count * axis.ep, axis) for ids in all_ids]
        agreement = Agreement(plans if options.presize is None else options.presize(plans), axis)
        return [
            RoutedTokens(x, weights, _Call(agreement, index, ids, experts, axis, options.zero_memory, each))
            for index, ((x, _, weights), ids, each) in enumerate(zip(pieces, all_ids, replicas, strict=True))
        ]


@dataclass(frozen=True)
class _Call:
    """The state of one call of a layer, which the nodes of its forward and backward share."""

    agreement: Agreement
    index: int
    ids: torch.Tensor
    experts: ExpertWeights
    axis: ExpertAxis
    zero_memory: ZeroMemory
    replicas: Replicas | None
    tokens: InFlight[torch.Tensor] = field(default_factory=InFlight)
    """The tokens sent to their experts; in backward the gradients of their sums."""
    extra: InFlight[torch.Tensor] = field(default_factory=InFlight)
    """The routing sent with the tokens; in backward the tokens again, if they were not kept."""
    unsent: list[Callable[[], torch.Tensor]] = field(default_factory=list)
    """Computes the second product and the sums [N, H] over this rank's experts; empty once they have been sent."""
    sums: InFlight[torch.Tensor] = field(default_factory=InFlight)
    """The sums sent back; in backward the gradients of the tokens."""
    weights: InFlight[torch.Tensor] = field(default_factory=InFlight)
    fetched: InFlight[Parameters] = field(default_factory=InFlight)
    """The weights of this rank's experts, followed by those of its replicas."""
    paired_pass: PairedPass = field(default_factory=running_pass)

    @property
    def count(self) -> int:
        """The experts of this rank and its slots for replicas."""
        return len(self.experts) if self.replicas is None else self.replicas.plan.slots

    @property
    def parameters(self) -> Parameters:
        """The parameters of this rank's experts: up, down and their biases."""
        of = self.experts
        return of.up, of.down, of.up_bias, of.down_bias

    def fetch(self) -> None:
        """Begin to send the weights of replicas."""
        if self.replicas is not None:
            self.fetched.post(self.replicas.fetch(self.parameters))

    def send_sums(self) -> None:
        """Compute the sums over this rank's experts and begin to send them back to their tokens."""
        with torch.no_grad():
            self.sums.post(self.dispatch.combine(self.unsent.pop()()))

    def with_replicas(self, parameters: Parameters) -> Parameters:
        """``parameters`` of this rank's experts, or the fetched ones where there are replicas."""
        return parameters if self.replicas is None else self.fetched.wait()

    @property
    def plan(self) -> Plan:
        return self.agreement.plans[self.index]

    @property
    def dispatch(self) -> Dispatch:
        return self.agreement.dispatches[self.index]

    def routing(self, weights_TK: torch.Tensor) -> torch.Tensor:
        """[T, 2 K]: weights, then experts + 1, as one message; 0 is no expert, as in padding rows."""
        # Expert ids are exact in float32.
        wide = weights_TK.to(torch.promote_types(weights_TK.dtype, torch.float32))
        return torch.cat([wide, (self.ids + 1).to(wide.dtype)], 1)


@dataclass(frozen=True)
class _Rows:
    """The rows received by this rank, in the order of its experts."""

    counts: torch.Tensor
    """[E] int64: the rows of each expert."""
    order: Order
    weights: torch.Tensor
    """[P]: the routing weight of each pair."""

    @property
    def experts(self) -> torch.Tensor:
        """[P] int64: the expert of each pair."""
        return torch.repeat_interleave(self.counts, output_size=len(self.weights))

    def products(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The inner product [P] of each row of x and y [P, ...], in the dtype of the weights, which is no narrower."""
        wide = torch.promote_types(x.dtype, self.weights.dtype)
        return (x.to(wide) * y).sum(1).to(self.weights.dtype)


def _received(rows_NH: torch.Tensor, routing_N2K: torch.Tensor, call: _Call) -> tuple[torch.Tensor, _Rows]:
    """The received rows [P, H], sorted by expert, and their description."""
    weights_NK, numbers_NK = routing_N2K.chunk(2, dim=1)
    count = call.count
    local_NK = local_ids(numbers_NK.to(torch.int64) - 1, call.axis.ep_rank * count, count)
    permuted_PH, positions = token_permute(
        rows_NH, local_NK, min(sum(call.dispatch.pairs_of_experts), local_NK.numel())
    )
    pairs = inverse(positions)[: len(permuted_PH)].long()
    positions_NK = positions.view_as(local_NK)
    counts = histogram(local_NK, count)
    weights = weights_NK.flatten().index_select(0, pairs)
    if call.dispatch.fills_up:
        counts, positions_NK, has_expert = filled_up(counts, positions_NK, local_NK, len(permuted_PH))
        weights = weights * has_expert
    return permuted_PH, _Rows(counts, Order(pairs // local_NK.shape[1], positions_NK), weights)


class _CallContext(Context):
    call: _Call


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _CallContext, x_TH: torch.Tensor, weights_TK: torch.Tensor, call: _Call) -> torch.Tensor:
        ctx.call = call
        copies = call.plan.copies(x_TH)
        routing = call.plan.labels(call.routing(weights_TK))
        call.tokens.post(call.dispatch.send_copies(copies))
        call.extra.post(call.dispatch.send_copies(routing))
        call.fetch()
        return x_TH.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: _CallContext, dlink: torch.Tensor) -> tuple[Optional, ...]:
        ctx.call.paired_pass.hand_over(PassKind.BACKWARD)
        # Autograd casts the gradient of the weights to their dtype.
        return ctx.call.sums.wait(), ctx.call.weights.wait(), None


class _ComputeContext(_CallContext):
    rows: _Rows


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _ComputeContext, link: torch.Tensor, call: _Call, *parameters: Optional) -> torch.Tensor:
        routing_N2K = call.extra.wait()
        rows_NH = call.tokens.wait()
        permuted_PH, rows = _received(rows_NH, routing_N2K, call)
        up, down, up_bias, down_bias = call.with_replicas(parameters)
        assert up is not None and down is not None
        first_PF = call.experts.forward(permuted_PH, up, rows.counts)
        if up_bias is not None:
            first_PF.add_(up_bias.index_select(0, rows.experts))
        # The second product is computed later: a recomputation ends with what this node saves.
        call.unsent.append(partial(_outputs, call.experts, rows, first_PF, down, down_bias))
        ctx.call, ctx.rows = call, rows
        level = call.zero_memory
        kept = rows_NH if level == "none" else None
        ctx.save_for_backward(kept, None if level == "level1" else first_PF, *parameters)
        return link.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: _ComputeContext, dlink: torch.Tensor) -> tuple[Optional, ...]:
        call, rows, experts = ctx.call, ctx.rows, ctx.call.experts
        call.paired_pass.hand_over(PassKind.BACKWARD)
        rows_NH, first_PF, *parameters = ctx.saved_tensors
        # Computed while the gradients of the sums travel, which it does not need:
        up, down, up_bias, down_bias = call.with_replicas(parameters)
        assert up is not None and down is not None
        if first_PF is None:
            rows_NH = call.extra.wait()
            first_PF = experts.forward(rows.order.permuted(rows_NH), up, rows.counts)
            if up_bias is not None:
                first_PF.add_(up_bias.index_select(0, rows.experts))
        with torch.enable_grad():
            first_PF = first_PF.detach().requires_grad_()
            activated_PI = experts.activation(first_PF)
        dy_PH = rows.order.permuted(call.tokens.wait())
        dweighted_PI = experts.input_gradient(dy_PH, down, rows.counts)
        (dfirst_PF,) = torch.autograd.grad(activated_PI, first_PF, weighted(dweighted_PI, rows.weights))
        activated_PI = activated_PI.detach()
        if ctx.needs_input_grad[0]:
            dpermuted_PH = experts.input_gradient(dfirst_PF, up, rows.counts)
            call.sums.post(call.dispatch.combine(token_unpermute(dpermuted_PH, rows.order.positions)))
            del dpermuted_PH  # The tokens take its memory.
            dweights_P = rows.products(activated_PI, dweighted_PI)
            if down_bias is not None:
                dweights_P += rows.products(down_bias.index_select(0, rows.experts), dy_PH)
            call.weights.post(call.dispatch.combine(rows.order.unpermuted(dweights_P)))
        # Computed while the gradients of tokens and routing weights travel:
        dup = ddown = None
        rows_NH = call.extra.wait() if rows_NH is None else rows_NH
        if ctx.needs_input_grad[2]:
            dup = experts.gradient_of(up, rows.order.permuted(rows_NH), dfirst_PF, rows.counts)
        if ctx.needs_input_grad[3]:
            ddown = experts.gradient_of(down, weighted(activated_PI, rows.weights), dy_PH, rows.counts)
        biases = (_sums(up_bias, dfirst_PF, rows), _sums(down_bias, weighted(dy_PH, rows.weights), rows))
        return dlink, None, *gathered_gradients(call.replicas, (dup, ddown, *biases))


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _CallContext, link: torch.Tensor, again_TH: Optional, call: _Call) -> torch.Tensor:
        ctx.call = call
        ctx.save_for_backward(again_TH)
        return call.sums.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: _CallContext, dout_TH: torch.Tensor) -> tuple[Optional, ...]:
        call, (again_TH,) = ctx.call, ctx.saved_tensors
        # Level 1 computes the first product again while the gradients travel; level 0 needs the tokens last.
        if call.zero_memory == "level1":
            call.extra.post(call.dispatch.send(again_TH))
        call.tokens.post(call.dispatch.send(dout_TH))
        if call.zero_memory == "level0":
            call.extra.post(call.dispatch.send(again_TH))
        call.fetch()
        return dout_TH.new_empty(0), None, None


def _outputs(
    experts: ExpertWeights, rows: _Rows, first_PF: torch.Tensor, down: torch.Tensor, down_bias: Optional
) -> torch.Tensor:
    """For each received row the sum [N, H] of its experts' outputs on this rank, from the first product [P, F]."""
    y_PH = experts.forward(weighted(experts.activation(first_PF), rows.weights), down, rows.counts)
    if down_bias is not None:
        y_PH.add_(weighted(down_bias.index_select(0, rows.experts), rows.weights))
    return token_unpermute(y_PH, rows.order.positions)


def _sums(bias: Optional, dy: torch.Tensor, rows: _Rows) -> Optional:
    """The gradient of a bias [E, N]: the sum of dy [P, N] over the rows of each expert; None without a bias."""
    return None if bias is None else torch.zeros_like(bias).index_add_(0, rows.experts, dy)


_send = applied(_Send, _Send.forward)
_compute = applied(_Compute, _Compute.forward)
_finish = applied(_Finish, _Finish.forward)

ALL_TO_ALL = Planned(ABILITIES["alltoall"], AllToAllPlan.of)
DISPATCHERS: dict[str, Dispatcher] = {
    "alltoall": ALL_TO_ALL,
    "allgather": Planned(ABILITIES["allgather"], AllGatherPlan.of),
    "evenly": Planned(ABILITIES["alltoall"], EvenPlan.of),
    "fused": FusedDispatcher(ALL_TO_ALL),
}
"""The values of ``ds_npu.moe.dispatcher``, and the one that replaces ``alltoall`` under ``pad_to_capacity``."""


def register_dispatcher(name: str, dispatcher: Dispatcher) -> None:
    """Make ``dispatcher`` a value of ``ds_npu.moe.dispatcher``; it replaces one of the same name."""
    ABILITIES[name] = dispatcher.can
    DISPATCHERS[name] = dispatcher
