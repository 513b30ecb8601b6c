"""Where a storage waits on the host: as it is, or coded in fewer bytes."""

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
    """How a storage is coded, and where what does not fit into the code goes."""

    layout: CodeLayout
    overflow: HostBuffer
    """Host memory that the device reads and writes itself."""


@dataclass(frozen=True)
class HostPlace:
    """Place of one storage, ``size`` bytes of which are copied."""

    size: int
    buffer: HostBuffer
    code: HostCode | None = None

    @property
    def home(self) -> torch.Tensor:
        """[size] uint8 of the host."""
        return self.buffer.data[: self.size]

    def buffers(self) -> Iterator[HostBuffer]:
        """All that is used."""
        yield self.buffer
        if self.code is not None:
            yield self.code.overflow


class HostPlaces:
    """Places of one model's storages, which are given back and taken again."""

    def __init__(self, device_type: str, compresses: bool) -> None:
        self.pool = host_pool(is_pinned=device_type != "cpu")
        self._compresses = compresses

    def take(self, tensor: torch.Tensor) -> HostPlace:
        """A place for the storage of ``tensor``, which may only be written behind its buffers' ``used``."""
        size = tensor.untyped_storage().nbytes()
        layout = exponent_code.code_layout(tensor.dtype, size) if self._compresses else None
        if layout is None:
            return HostPlace(size, self.pool.take(size))
        buffer = self.pool.take(layout.size)
        try:
            overflow = overflow_pool(tensor.device).take(layout.overflow)
        except MemoryError:
            self.pool.give(buffer)
            raise
        return HostPlace(layout.size, buffer, HostCode(layout, overflow))

    def give(self, place: HostPlace) -> None:
        """Take ``place`` back, whose last copies may still run."""
        self.pool.give(place.buffer)
        if place.code is not None:
            overflow_pool(place.code.overflow.data.device).give(place.code.overflow)


@functools.cache
def overflow_pool(device: torch.device) -> HostPool:
    """Buffers for what does not fit into codes, one pool in the process.

    Freeing them waits for no stream (torch_npu 2.13), or never happens (earlier ones).
    """
    return HostPool(lambda size: exponent_code.overflow_memory(size, device))


@dataclass(frozen=True)
class StorageCopy:
    """A storage ``data`` [n] uint8 of the device, and its place."""

    data: torch.Tensor
    place: HostPlace

    def encode(self, stage: torch.Tensor) -> None:
        """Write the code of ``data`` into ``stage`` [place.size] uint8, and its overflow."""
        code = self._code
        exponent_code.encode(self.data.view(code.layout.dtype), code.layout, stage, code.overflow.data)

    def decode(self, stage: torch.Tensor) -> None:
        """Write into ``data`` what ``stage`` [place.size] uint8 and the overflow are the code of."""
        code = self._code
        exponent_code.decode(self.data.view(code.layout.dtype), code.layout, stage, code.overflow.data)

    @property
    def _code(self) -> HostCode:
        assert self.place.code is not None
        return self.place.code
