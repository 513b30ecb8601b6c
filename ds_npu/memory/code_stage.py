"""Memory of a device for codes on their way, and the stream on which they are made and read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

SLOTS = 2
"""One code is made or read while another is copied."""


@dataclass
class StageSlot:
    """A place for one code at a time: [the largest so far] uint8."""

    memory: torch.Tensor | None = None
    emptied: Any = None
    """The event behind the last operation on it."""


class CodeStage:
    """The slots, used in turn by both directions; ``stream`` codes."""

    def __init__(self, device: Any, copies: Sequence[Any]) -> None:
        """``device``: torch's module for it; ``copies``: the streams that carry codes to the host and back."""
        self._device = device
        self.stream = device.Stream()
        self._users = (self.stream, *copies)
        self._slots = deque(StageSlot() for _ in range(SLOTS))

    def take(self, size: int, stream: Any) -> tuple[StageSlot, torch.Tensor]:
        """The next slot and [size] uint8 in it, for ``stream``, which is the first to write into it."""
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
