"""Device memory for codes in transfer, and the stream that encodes and decodes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

SLOTS = 2
"""One code is encoded or decoded while another is copied."""


@dataclass
class StageSlot:
    """Memory for one code at a time: [largest code so far] uint8."""

    memory: torch.Tensor | None = None
    emptied: torch.Event | None = None
    """Recorded after the last operation on the memory."""


class CodeStage:
    """Slots that both directions use alternately; ``stream`` encodes and decodes."""

    def __init__(self, device: ModuleType, copies: Sequence[torch.Stream]) -> None:
        """``device``: torch's module for it; ``copies``: the streams that carry codes to the host and back."""
        self._device = device
        self.stream: torch.Stream = device.Stream()
        self._users = (self.stream, *copies)
        self._slots = deque(StageSlot() for _ in range(SLOTS))

    def take(self, size: int, stream: torch.Stream) -> tuple[StageSlot, torch.Tensor]:
        """Return the next slot and [size] uint8 in it; ``stream`` is the first that writes to it."""
        slot = self._slots[0]
        self._slots.rotate(-1)
        if slot.emptied is not None:
            stream.wait_event(slot.emptied)
        if slot.memory is None or slot.memory.numel() < size:
            slot.memory = None
            with self._device.stream(stream):
                slot.memory = torch.empty(size, dtype=torch.uint8, device=self._device.current_device())
            for each in self._users:
                slot.memory.record_stream(each)
        return slot, slot.memory[:size]
