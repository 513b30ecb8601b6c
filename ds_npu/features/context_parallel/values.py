"""Values that are exchanged as soon as they are projected, while queries and keys are turned by their positions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from ds_npu.config.roles import Role
from ds_npu.features.context_parallel.batch import Running
from ds_npu.features.tensor_parallel.role_shards import local_heads
from ds_npu.models.plan import ModelPlan
from ds_npu.parallel.context.attention import ulysses_plan
from ds_npu.parallel.context.ulysses import PostedTensor, post_to_heads
from ds_npu.topology.topology import Topology


class EarlyValues:
    """Lets the values of each attention depart to its Ulysses ranks right behind their projection.

    Going back, their gradient is on its way while that of the turning is computed. Queries and keys are turned first,
    so they depart later. Only where values are what a linear made: not with one linear for all three, nor an adapter.
    """

    def __init__(self, model: nn.Module, plan: ModelPlan, topology: Topology, running: Running) -> None:
        self.running = running
        self._departed: dict[nn.Module, PostedTensor] = {}
        self._changed: set[nn.Module] = set()
        self._waiting: dict[nn.Module, tuple[nn.Module, int, int]] = {}
        """Attentions that have not been called yet: projection, query heads of this rank, width of a value."""
        for name in plan.named(Role.VALUE):
            attention = plan.around(name, Role.ATTENTION)
            if attention is not None and attention in plan.attentions:
                shape = plan.attentions[attention]
                heads = len(local_heads(shape, topology.size("tp"))[topology.rank("tp")].queries)
                self._waiting[model.get_submodule(attention)] = model.get_submodule(name), heads, shape.value_dim

    def of(self, attention: nn.Module, value_BSND: torch.Tensor) -> torch.Tensor | PostedTensor:
        """What has departed of ``attention``, if that is ``value_BSND``, else this itself."""
        if attention in self._waiting:
            projection, heads, width = self._waiting.pop(attention)
            # Behind the hooks of others (ZeRO-3 fetches weights for backward in one), which may replace the output.
            projection.register_forward_hook(partial(self._depart, attention, heads, width))
        flight = self._departed.pop(attention, None)
        if flight is None or _same(flight.sent, value_BSND):
            return flight or value_BSND
        # Something changes values behind their projection. In vain this once: every rank began it, and none will again.
        self._changed.add(attention)
        flight.wait()
        return value_BSND

    def _depart(
        self, attention: nn.Module, heads: int, width: int, projection: nn.Module, _args: Any, out: torch.Tensor
    ) -> None:
        batch = self.running.split
        if batch is None or batch.axis.algorithm.ulysses == 1 or attention in self._changed:
            return
        hooks = vars(projection)
        if hooks["_backward_hooks"] or hooks["_backward_pre_hooks"]:
            # torch calls these for what a module returns, which nobody would use.
            return
        values = torch.unflatten(out, -1, (-1, width))
        exchange = ulysses_plan(batch.axis, heads, values.shape[2], batch.tokens).key
        self._departed[attention] = post_to_heads(values, exchange)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they are views of the same numbers."""
    first, second = ((x.data_ptr(), x.dtype, x.shape, x.stride()) for x in (one, other))
    return first == second
