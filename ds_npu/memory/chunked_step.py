"""Steps an elementwise optimizer chunk after chunk, over state that is kept in another form.

State in host memory is copied to the device and back, both ways at once, while another chunk is stepped. There are
three slots on the device: one is filled, one is worked in, one is emptied. Events order the streams; the host waits for
none of them. On the CPU device and host memory are one, and nothing is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ds_npu.memory.moment_forms import Parts
from ds_npu.memory.state_chunks import MASTER, StateChunk, StateShard, Values, elementwise

Group = dict[str, Any]
Scalars = dict[str, object]
SLOTS = 3
ALIGNMENT = 512
"""Alignment of a tensor in a slot, in bytes: that of the device's allocator."""


@dataclass
class _Slot:
    memory: torch.Tensor
    parts: dict[str, Parts] = field(default_factory=dict)
    filled: torch.Event | None = None
    emptied: torch.Event | None = None


class StateTransfers:
    """The copies of each step: ``begin``; for each chunk ``receive`` and ``send``; ``end``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: ModuleType = torch.get_device_module(device)
        self._streams: tuple[torch.Stream, torch.Stream] | None = None
        """Streams to the device and to the host, made by the first step that needs them."""
        self._slots: list[_Slot] = []
        self._filled: deque[_Slot] = deque()
        self._worked_in: _Slot | None = None
        self._coming: deque[StateChunk] = deque()
        self._count = 0

    def begin(self, coming: deque[StateChunk]) -> None:
        """Fetch the first of ``coming``, the chunks of the step that are in host memory, in order."""
        if self._device.type == "cpu" or not coming:
            return
        if self._streams is None:
            self._streams = (self._module.Stream(self._device), self._module.Stream(self._device))
        size = max(sum(_aligned(each.nbytes) for parts in chunk.kept.values() for each in parts) for chunk in coming)
        slots = min(SLOTS, len(coming))
        self._slots = [_Slot(torch.empty(size, dtype=torch.uint8, device=self._device)) for _ in range(slots)]
        self._coming, self._count = coming, 0
        # Earlier operators on the slots' memory may still run.
        self._streams[0].wait_stream(self._module.current_stream(self._device))
        self._fetch()

    def receive(self, chunk: StateChunk) -> dict[str, Parts]:
        """Return the packed state of ``chunk``, the next one, on the device, and begin to fetch the one after it."""
        if self._device.type == "cpu":
            return chunk.kept
        slot = self._worked_in = self._filled.popleft()
        self._module.current_stream(self._device).wait_event(slot.filled)
        self._fetch()
        return slot.parts

    def send(self, chunk: StateChunk, parts: dict[str, Parts]) -> None:
        """Keep ``parts`` of the chunk that was received last."""
        slot = self._worked_in
        if slot is None or self._streams is None:
            chunk.keep(parts)
            return
        # The slot has no memory for what a first step adds; the host waits for it once.
        chunk.keep({name: each for name, each in parts.items() if name not in slot.parts})
        for name, targets in slot.parts.items():
            for target, each in zip(targets, parts[name], strict=True):
                if target is not each:
                    target.copy_(each)
        outward = self._streams[1]
        outward.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(outward):
            for name, targets in slot.parts.items():
                for home, target in zip(chunk.kept[name], targets, strict=True):
                    home.copy_(target, non_blocking=True)
            chunk.sent = slot.emptied = outward.record_event()

    def end(self) -> None:
        """Free the slots once no copy uses them; called after a step that raised, too."""
        for stream in self._streams or ():
            self._module.current_stream(self._device).wait_stream(stream)
        self._slots, self._worked_in = [], None
        self._filled.clear()

    def _fetch(self) -> None:
        if not self._coming or self._streams is None:
            return
        chunk = self._coming.popleft()
        slot = self._slots[self._count % len(self._slots)]
        self._count += 1
        inward = self._streams[0]
        with self._module.stream(inward):
            for event in (slot.emptied, chunk.sent):
                if event is not None:
                    inward.wait_event(event)
            slot.parts = _views(chunk, slot.memory)
            for name, targets in slot.parts.items():
                for target, home in zip(targets, chunk.kept[name], strict=True):
                    target.copy_(home, non_blocking=True)
            slot.filled = inward.record_event()
        self._filled.append(slot)


def _views(chunk: StateChunk, memory: torch.Tensor) -> dict[str, Parts]:
    """Return tensors in ``memory`` like those that ``chunk`` keeps."""
    targets: dict[str, Parts] = {}
    first = 0
    for name, tensors in chunk.kept.items():
        found = []
        for each in tensors:
            found.append(memory[first : first + each.nbytes].view(each.dtype))
            first += _aligned(each.nbytes)
        targets[name] = tuple(found)
    return targets


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class ChunkedStep:
    """Replaces ``optimizer.step`` by the same step over one chunk at a time, the optimizer's only parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer, shards: Sequence[StateShard]) -> None:
        self.optimizer, self.shards = optimizer, shards
        self._step: Callable[[], object] = optimizer.step
        self._shard_of = {id(shard.master): shard for shard in shards}
        self._transfers = StateTransfers(shards[0].device)
        self.has_changed = False
        """Whether this step has begun to change weights or state; the caller resets it."""

    @torch.no_grad()
    def __call__(self, closure: object = None) -> None:
        """Step every master of the optimizer's groups that has a gradient; a master then holds its rounded weights."""
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
                shard.scalars = scalars
                shard.steps = shard.steps + 1
                # DeepSpeed then copies the rounding of a master, which is its weights, into them.
                shard.master.data = shard.weight()
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
