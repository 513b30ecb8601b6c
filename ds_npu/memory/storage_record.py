"""Records storages while something runs: when each is made and freed, and how many bytes it has.

A dispatch mode sees the tensors that operators return, a finalizer when their storage is freed; so it also runs where
no allocator counts (on the CPU). A storage that is made and freed within one operator is not seen.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_npu.parallel.runtime.calls import Arguments, Keywords


def has_storage(kind: type) -> bool:
    """Whether tensors of this type have their own storage: a type that dispatches itself may wrap others."""
    return getattr(kind, "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__


@dataclass(frozen=True)
class StorageChange:
    """A storage is made, is freed, or changes its size."""

    storage: int
    """Its number in ``StorageRecord.uses``."""
    size: int
    """Additional bytes of the storage."""


@dataclass(frozen=True)
class AllocatorSample:
    """The counts of a device's allocator at one moment, in bytes."""

    changes: int
    """Number of changes of storages until then."""
    allocated: int
    peak: int
    """The most that was allocated since the record began."""


class StorageRecord(TorchDispatchMode):
    """The storages of ``device_type`` that operators return while it is entered, and those given to ``see``.

    ``use`` returns the purpose of a storage that is made now. ``allocator`` returns (allocated, peak) in bytes.
    """

    def __init__(
        self, device_type: str, use: Callable[[], str], allocator: Callable[[], tuple[int, int]] | None = None
    ) -> None:
        TorchDispatchMode.__init__(self)
        self.uses: list[str] = []
        """The purpose of each storage, by its number."""
        self.changes: list[StorageChange] = []
        self.samples: list[AllocatorSample] = []
        self._device_type, self._use, self._allocator = device_type, use, allocator
        self._known: dict[int, tuple[int, int]] = {}
        """Number and bytes of each storage, by its address."""
        self._ends: dict[int, weakref.finalize[Any, torch.UntypedStorage]] = {}
        self.is_closed = False

    def see_all(self) -> None:
        """Record every existing tensor, after garbage is collected."""
        gc.collect()
        for each in gc.get_objects():
            if issubclass(type(each), torch.Tensor):
                self.see(each)

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Iterable[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        if not all(map(has_storage, types)):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if self.is_closed:
            return out
        before = len(self.changes)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        if len(self.changes) > before:
            self._ask_allocator()
        return out

    def see(self, tensor: torch.Tensor, use: str | None = None) -> None:
        """Record the storage of ``tensor``; ``use`` replaces its purpose."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.is_closed or not has_storage(type(tensor)) or tensor.device.type != self._device_type:
                return
            storage = tensor.untyped_storage()
        size = storage.nbytes()
        number, known = self._known.get(storage._cdata, (None, 0))
        if number is None:
            if size == 0:
                return
            number = len(self.uses)
            self.uses.append(use or self._use())
            end = weakref.finalize(storage, self._freed, storage._cdata)
            end.atexit = False
            self._ends[storage._cdata] = end
        elif use is not None:
            self.uses[number] = use
        if size != known:
            self._known[storage._cdata] = number, size
            self.changes.append(StorageChange(number, size - known))

    def close(self) -> None:
        """Record nothing from now on."""
        self._ask_allocator()
        self.is_closed = True
        for end in self._ends.values():
            end.detach()
        self._ends.clear()

    def _freed(self, address: int) -> None:
        number, size = self._known.pop(address)
        self._ends.pop(address, None)
        self.changes.append(StorageChange(number, -size))

    def _ask_allocator(self) -> None:
        if self._allocator is not None:
            self.samples.append(AllocatorSample(len(self.changes), *self._allocator()))


class AllocatorMeter:
    """Measures peaks of device memory, one interval after the other, by the device's allocator.

    The allocator's own peak is reset, too; the host waits for nothing.
    """

    def __init__(self, device_type: str) -> None:
        self._device: ModuleType = torch.get_device_module(device_type)
        self.peak()

    def peak(self) -> int:
        """Return the most bytes that were allocated since the last call; a new interval begins."""
        found = int(self._device.max_memory_allocated())
        self._device.reset_peak_memory_stats()
        return found


class StorageMeter:
    """Measures the peaks of the storages in ``record``, where no allocator counts."""

    def __init__(self, record: StorageRecord) -> None:
        self._record = record
        self._counted = 0
        self._held = 0

    def peak(self) -> int:
        """Return the most bytes of storages since the last call; a new interval begins."""
        most = self._held
        for change in self._record.changes[self._counted :]:
            self._held += change.size
            most = max(most, self._held)
        self._counted = len(self._record.changes)
        return most


PeakMeter = AllocatorMeter | StorageMeter
