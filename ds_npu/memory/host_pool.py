"""Host memory that copies from and to a device use again and again: pinning it is slow, and may wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ds_npu.comm.pinned import pinned

STEPS_OF_A_DOUBLING = 8
"""Sizes are rounded up to one of so many between a power of two and the next: at most an eighth is not used."""


@dataclass
class HostBuffer:
    """Bytes of the host: [at least so many as asked for] uint8."""

    data: torch.Tensor
    used: Any = None
    """The event behind the last copy that reads or writes it; None: nothing does."""


class HostPool:
    """Buffers that are given back and taken again; they are never freed."""

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        """``make``: [n] uint8 for n."""
        self._make = make
        self._free: dict[int, list[HostBuffer]] = {}
        self.size = 0
        """Bytes of all buffers."""

    def take(self, size: int) -> HostBuffer:
        """A buffer of at least ``size`` bytes, which may only be written behind its ``used``; raises MemoryError."""
        rounded = _rounded(size)
        free = self._free.setdefault(rounded, [])
        try:
            # Another thread gives buffers back.
            return free.pop()
        except IndexError:
            made = HostBuffer(self._make(rounded))
            self.size += rounded
            return made

    def give(self, buffer: HostBuffer) -> None:
        """Take ``buffer`` back, whose last copies may still run."""
        self._free[buffer.data.numel()].append(buffer)


def host_pool(is_pinned: bool) -> HostPool:
    """A pool of memory that copies of devices use, pinned for NPUs."""
    return HostPool(lambda size: pinned(torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)))


def _rounded(size: int) -> int:
    step = max(1, (1 << (size - 1).bit_length()) // (2 * STEPS_OF_A_DOUBLING)) if size > 1 else 1
    return -(-size // step) * step
