"""Copies the chunks' state in host memory to the device and back, both ways at once, while another chunk is stepped.

There are three slots on the device: one is filled, one is worked in, one is emptied. Events order the streams; the host
waits for none of them. On the CPU device and host memory are one, and nothing is copied.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import ModuleType

import torch

from ds_npu.memory.moment_forms import Parts
from ds_npu.memory.state_chunks import StateChunk

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
        """Free the slots when no copy uses them any more; after a step that raised, too."""
        for stream in self._streams or ():
            self._module.current_stream(self._device).wait_stream(stream)
        self._slots, self._worked_in = [], None
        self._filled.clear()

    def _fetch(self) -> None:
        if not self._coming or self._streams is None:
            return
        chunk, slot = self._coming.popleft(), self._slots[self._count % len(self._slots)]
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
