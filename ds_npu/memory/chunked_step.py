"""Steps an elementwise optimizer chunk after chunk, over state that is kept in another form."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ds_npu.memory.state_chunks import MASTER, StateChunk, StateShard, Values, elementwise
from ds_npu.memory.state_transfers import StateTransfers

Group = dict[str, Any]
Scalars = dict[str, object]


class ChunkedStep:
    """Replaces ``optimizer.step`` by the same step over one chunk at a time, the optimizer's only parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer, shards: Sequence[StateShard]) -> None:
        self.optimizer, self.shards = optimizer, shards
        self._step: Callable[[], object] = optimizer.step
        self._shard_of = {id(shard.master): shard for shard in shards}
        self._transfers = StateTransfers(shards[0].weight.device)
        self.has_changed = False
        """Whether this step has begun to change weights or state; the caller resets it."""

    @torch.no_grad()
    def __call__(self, closure: object = None) -> None:
        """Step every master of the optimizer's groups that has a gradient; the masters then show their weights."""
        if closure is not None:
            raise ValueError("step(closure): found one; ds_npu.optimizer_memory steps without, as ZeRO does")
        found = [
            (group, self._shard_of[id(master)])
            for group in self.optimizer.param_groups
            for master in group["params"]
            if master.grad is not None
        ]
        coming = deque(chunk for _, shard in found for chunk in shard.chunks if chunk.on_host)
        try:
            self._transfers.begin(coming)
            for group, shard in found:
                scalars = shard.scalars
                for chunk in shard.chunks:
                    scalars = self._step_chunk(group, shard, chunk)
                shard.scalars, shard.steps = scalars, shard.steps + 1
                # DeepSpeed then copies the rounding of a master, which is its weights, into them.
                shard.master.data = shard.weight
        finally:
            self._transfers.end()

    def _step_chunk(self, group: Group, shard: StateShard, chunk: StateChunk) -> Scalars:
        parts = self._transfers.receive(chunk) if chunk.on_host else chunk.kept
        values, scalars = self._stepped(group, shard, chunk.unpack(parts), shard.gradient(chunk))
        chunk.weight.copy_(values[MASTER])
        kept = chunk.pack(values, shard.seed())
        if chunk.on_host:
            self._transfers.send(chunk, kept)
        else:
            chunk.keep(kept)
        return scalars

    def _stepped(
        self, group: Group, shard: StateShard, values: Values, gradient: torch.Tensor
    ) -> tuple[Values, Scalars]:
        """Return the values after the optimizer's step, and its count of steps, which is the same for all chunks."""
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        parameter = nn.Parameter(values.pop(MASTER))
        parameter.grad = gradient
        if shard.scalars or values:
            optimizer.state[parameter] = {
                **{
                    key: each.clone() if isinstance(each, torch.Tensor) else each for key, each in shard.scalars.items()
                },
                **values,
            }
        alone = {**group, "params": [parameter]}
        optimizer.param_groups = [alone]
        self.has_changed = True
        try:
            self._step()
        finally:
            optimizer.param_groups = groups
            state = optimizer.state.pop(parameter, {})
        arrays = elementwise(state, parameter)
        group.update({name: each for name, each in alone.items() if name != "params"})
        return {MASTER: parameter.data, **arrays}, {name: each for name, each in state.items() if name not in arrays}
