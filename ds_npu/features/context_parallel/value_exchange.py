"""Ulysses exchange of values that overlaps with the rotary embedding of queries and keys."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from ds_npu.config.roles import Role
from ds_npu.features.context_parallel.sharded_batch import RunningBatch
from ds_npu.models.attention_modules import local_heads
from ds_npu.models.plan import ModelPlan
from ds_npu.parallel.context.attention import ulysses_plan
from ds_npu.parallel.context.ulysses import PostedTensor, post_to_heads
from ds_npu.parallel.runtime.micro_batch import Fact, running
from ds_npu.topology.topology import Topology


class ValueExchangeOverlap:
    """Starts the Ulysses all-to-all of each attention's values right behind their projection.

    In backward the gradient of the values is in flight while the gradient of the rotary embedding is computed. Queries
    and keys are exchanged after the rotary embedding. Only for values that are the output of one linear: not with a
    fused projection of queries, keys and values, nor with an adapter.
    """

    def __init__(self, model: nn.Module, plan: ModelPlan, topology: Topology, running_batch: RunningBatch) -> None:
        self.model, self.running_batch = model, running_batch
        self._in_flight: Fact[dict[nn.Module, PostedTensor]] = Fact(while_running=True)
        self._changed: set[nn.Module] = set()
        """Attentions that change values between projection and attention function, which exchanges them instead."""
        self._to_hook: dict[nn.Module, tuple[str, int, int]] = {}
        """For attentions not called yet: the value projection's name, this rank's query heads, the width of a value."""
        for name in plan.named(Role.VALUE):
            attention = plan.around(name, Role.ATTENTION)
            if attention is not None and attention in plan.attentions:
                shape = plan.attentions[attention]
                heads = len(local_heads(shape, topology.size("tp"))[topology.rank("tp")].queries)
                self._to_hook[model.get_submodule(attention)] = name, heads, shape.value_dim

    @property
    def projections(self) -> list[str]:
        """The names of the value projections whose outputs are exchanged."""
        return [name for name, _, _ in self._to_hook.values()]

    def of(self, attention: nn.Module, value_BSND: torch.Tensor) -> torch.Tensor | PostedTensor:
        """The values of ``attention`` in flight, if the tensor sent was ``value_BSND``; else ``value_BSND`` itself."""
        if attention in self._to_hook:
            name, heads, width = self._to_hook.pop(attention)
            # Registered in the first forward, so behind other hooks, which may replace the output (ZeRO-3's hook that
            # fetches weights for backward does).
            projection = self.model.get_submodule(name)
            projection.register_forward_hook(partial(self._send, attention, heads, width))
        flight = (self._in_flight.of(running()) or {}).pop(attention, None)
        if flight is None or _same(flight.sent, value_BSND):
            return flight or value_BSND
        # The attention changed the values: this exchange was in vain, on every rank, and no rank will start another.
        self._changed.add(attention)
        flight.wait()
        return value_BSND

    def _send(
        self,
        attention: nn.Module,
        heads: int,
        width: int,
        projection: nn.Module,
        _args: tuple[torch.Tensor, ...],
        out: torch.Tensor,
    ) -> None:
        micro_batch = running()
        batch = self.running_batch.sharded
        if micro_batch is None or batch is None or batch.axis.algorithm.ulysses == 1 or attention in self._changed:
            return
        if projection._backward_hooks or projection._backward_pre_hooks:
            # torch calls these with the gradient of the module's output, which would then go unused.
            return
        values = torch.unflatten(out, -1, (-1, width))
        exchange = ulysses_plan(batch.axis, heads, values.shape[2], batch.tokens).key
        in_flight = self._in_flight.of(micro_batch) or {}
        self._in_flight.set(micro_batch, {**in_flight, attention: post_to_heads(values, exchange)})


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same view of the same memory."""
    first, second = ((x.data_ptr(), x.dtype, x.shape, x.stride()) for x in (one, other))
    return first == second
