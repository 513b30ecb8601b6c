"""Host memory in which storages wait, as they are or coded in fewer bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ds_npu.memory.host_pool import HostBuffer, HostPool, host_pool
from ds_npu.ops import exponent_code
from ds_npu.ops.exponent_code import CodeLayout


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
            return
        exponent_code.encode(self.data.view(code.layout.dtype), code.layout, stage, code.overflow.data)

    def decode(self, stage: torch.Tensor) -> None:
        """Write into ``data`` what ``stage`` [host.size] uint8 holds: its bytes, or their code."""
        code = self.host.code
        if code is None:
            self.data.copy_(stage, non_blocking=True)
            return
        exponent_code.decode(self.data.view(code.layout.dtype), code.layout, stage, code.overflow.data)
