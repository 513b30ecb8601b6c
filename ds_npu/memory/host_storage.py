"""Host memory in which storages wait, as they are or coded in fewer bytes.

It is taken again and again: pinning is slow, and may wait for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ds_npu.comm.host_copy import pinned
from ds_npu.ops import exponent_code
from ds_npu.ops.exponent_code import CodeLayout

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


@dataclass(frozen=True)
class HostCode:
    """The layout of a storage's code, and memory for the values that do not fit into it."""

    layout: CodeLayout
    overflow: HostBuffer
    """Host memory that the device reads and writes itself."""


@dataclass(frozen=True)
class HostStorage:
    """Host memory of one storage, ``size`` bytes of which are copied."""

    size: int
    buffer: HostBuffer
    code: HostCode | None = None

    @property
    def data(self) -> torch.Tensor:
        """The bytes that are copied: [size] uint8."""
        return self.buffer.data[: self.size]

    def buffers(self) -> Iterator[HostBuffer]:
        """Every buffer that it uses."""
        yield self.buffer
        if self.code is not None:
            yield self.code.overflow


class HostAllocator:
    """Host memory for one model's storages, which is given back and taken again."""

    def __init__(self, device_type: str, compresses: bool) -> None:
        self.pool = host_pool(is_pinned=device_type != "cpu")
        self._compresses = compresses

    def take(self, tensor: torch.Tensor) -> HostStorage:
        """Return memory for the storage of ``tensor``, to be written only after its buffers' ``used``."""
        size = tensor.untyped_storage().nbytes()
        layout = exponent_code.code_layout(tensor.dtype, size) if self._compresses else None
        if layout is None:
            return HostStorage(size, self.pool.take(size))
        buffer = self.pool.take(layout.size)
        try:
            overflow = overflow_pool(tensor.device).take(layout.overflow)
        except MemoryError:
            self.pool.give(buffer)
            raise
        return HostStorage(layout.size, buffer, HostCode(layout, overflow))

    def give(self, storage: HostStorage) -> None:
        """Take ``storage`` back; its last copies may still run."""
        self.pool.give(storage.buffer)
        if storage.code is not None:
            overflow_pool(storage.code.overflow.data.device).give(storage.code.overflow)


@functools.cache
def overflow_pool(device: torch.device) -> HostPool:
    """Buffers for values that do not fit into codes, one pool in the process.

    Freeing them waits for no stream (torch_npu 2.13), or never happens (earlier ones).
    """
    return HostPool(lambda size: exponent_code.overflow_memory(size, device))


@dataclass(frozen=True)
class StorageCopy:
    """A copy between ``data`` [n] uint8, a storage of the device, and its host memory."""

    data: torch.Tensor
    host: HostStorage

    def encode(self, stage: torch.Tensor) -> None:
        """Write ``data``, or its code and overflow, into ``stage`` [host.size] uint8."""
        code = self.host.code
        if code is None:
            stage.copy_(self.data, non_blocking=True)
        else:
            exponent_code.encode(self.data.view(code.layout.dtype), code.layout, stage, code.overflow.data)

    def decode(self, stage: torch.Tensor) -> None:
        """Write into ``data`` what ``stage`` [host.size] uint8 holds: its bytes, or their code."""
        code = self.host.code
        if code is None:
            self.data.copy_(stage, non_blocking=True)
        else:
            exponent_code.decode(self.data.view(code.layout.dtype), code.layout, stage, code.overflow.data)
