"""Copies of what chunks keep in host memory, to the device and back, both ways at once, while another is stepped.

There are three slots on the device: one is filled, one is worked in, one is emptied. Events order the streams; the host
waits for none of them. On the CPU device and host memory are one, and nothing is copied.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_npu.memory.moment_forms import Parts
from ds_npu.memory.state_chunks import StateChunk

SLOTS = 3
ALIGNMENT = 512
"""Bytes, of a tensor's beginning in a slot: that of the device's allocator."""


@dataclass
class _Slot:
    memory: torch.Tensor
    parts: dict[str, Parts] = field(default_factory=dict)
    filled: Any = None
    emptied: Any = None


class StateTransfers:
    """The copies of one step after the other. ``begin``; for each chunk ``receive``, ``send``; ``end``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._streams: tuple[Any, Any] | None = None
        """To the device, and to the host; made with the first step that needs them."""
        self._slots: list[_Slot] = []
        self._filled: deque[_Slot] = deque()
        self._worked_in: _Slot | None = None
        self._coming: deque[StateChunk] = deque()
        self._count = 0

    def begin(self, coming: deque[StateChunk]) -> None:
        """Start with the first of ``coming``, all chunks of the step that are in host memory, in order."""
        if self._module is None or not coming:
            return
        if self._streams is None:
            self._streams = (self._module.Stream(self._device), self._module.Stream(self._device))
        size = max(_size(chunk) for chunk in coming)
        slots = min(SLOTS, len(coming))
        self._slots = [_Slot(torch.empty(size, dtype=torch.uint8, device=self._device)) for _ in range(slots)]
        self._coming, self._count = coming, 0
        # The memory of slots may have been another tensor's, whose last operation is not done.
        self._streams[0].wait_stream(self._module.current_stream(self._device))
        self._fetch()

    def receive(self, chunk: StateChunk) -> dict[str, Parts]:
        """What ``chunk``, the next one, keeps, on the device; the one after it is on its way."""
        if self._module is None:
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
        # What a first step adds has no place in the slot; the host waits for it once.
        chunk.keep({name: each for name, each in parts.items() if name not in slot.parts})
        for name, places in slot.parts.items():
            for place, each in zip(places, parts[name], strict=True):
                if place is not each:
                    place.copy_(each)
        outward = self._streams[1]
        outward.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(outward):
            for name, places in slot.parts.items():
                for home, place in zip(chunk.kept[name], places, strict=True):
                    home.copy_(place, non_blocking=True)
            chunk.sent = slot.emptied = outward.record_event()

    def end(self) -> None:
        """Give the slots up, when no copy fills or empties them; after a step that raised, too."""
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
            slot.parts = _placed(chunk, slot.memory)
            for name, places in slot.parts.items():
                for place, home in zip(places, chunk.kept[name], strict=True):
                    place.copy_(home, non_blocking=True)
            slot.filled = inward.record_event()
        self._filled.append(slot)


def _placed(chunk: StateChunk, memory: torch.Tensor) -> dict[str, Parts]:
    """Tensors in ``memory`` like those that ``chunk`` keeps."""
    places: dict[str, Parts] = {}
    first = 0
    for name, tensors in chunk.kept.items():
        found = []
        for each in tensors:
            found.append(memory[first : first + each.nbytes].view(each.dtype))
            first += _aligned(each.nbytes)
        places[name] = tuple(found)
    return places


def _size(chunk: StateChunk) -> int:
    return sum(_aligned(each.nbytes) for parts in chunk.kept.values() for each in parts)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
