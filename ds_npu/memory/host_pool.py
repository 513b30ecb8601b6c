"""Host memory that copies from and to a device reuse: pinning is slow, and may wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ds_npu.comm.host_copy import pinned

STEPS_OF_A_DOUBLING = 8
"""Sizes between a power of two and the next, to which requests are rounded up: at most an eighth is not used."""


@dataclass
class HostBuffer:
    """Host memory: [at least the requested size] uint8."""

    data: torch.Tensor
    used: torch.Event | None = None
    """Recorded after the last copy that reads or writes it; None: no copy does."""


class HostPool:
    """Buffers that are taken, given back and taken again; none is ever freed."""

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        """``make(n)`` returns [n] uint8."""
        self._make = make
        self._free: dict[int, list[HostBuffer]] = {}
        self.size = 0
        """Bytes of all buffers."""

    def take(self, size: int) -> HostBuffer:
        """Return a buffer of at least ``size`` bytes, to be written only after its ``used``; raises MemoryError."""
        step = max(1, (1 << (size - 1).bit_length()) // (2 * STEPS_OF_A_DOUBLING)) if size > 1 else 1
        rounded = -(-size // step) * step
        free = self._free.setdefault(rounded, [])
        try:
            # Other threads take and give buffers, too.
            return free.pop()
        except IndexError:
            made = HostBuffer(self._make(rounded))
            self.size += rounded
            return made

    def give(self, buffer: HostBuffer) -> None:
        """Take ``buffer`` back; its last copies may still run."""
        self._free[buffer.data.numel()].append(buffer)


def host_pool(is_pinned: bool) -> HostPool:
    """Return a pool of memory for copies of devices, pinned for NPUs."""
    return HostPool(lambda size: pinned(torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)))
