"""The most device memory that was allocated between two moments, in bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import ModuleType

import torch

from ds_npu.memory.storage_record import StorageRecord


class PeakMeter(ABC):
    """Measures peaks, one interval after the other."""

    @abstractmethod
    def peak(self) -> int:
        """Return the most that was allocated since the last call; a new interval begins."""


class AllocatorMeter(PeakMeter):
    """Asks the device's allocator, whose own peak is reset, too; the host waits for nothing."""

    def __init__(self, device_type: str) -> None:
        self._device: ModuleType = torch.get_device_module(device_type)
        self.peak()

    def peak(self) -> int:
        found = int(self._device.max_memory_allocated())
        self._device.reset_peak_memory_stats()
        return found


class StorageMeter(PeakMeter):
    """Sums the storages in ``record``, where no allocator counts."""

    def __init__(self, record: StorageRecord) -> None:
        self._record, self._counted, self._held = record, 0, 0

    def peak(self) -> int:
        most = self._held
        for change in self._record.changes[self._counted :]:
            self._held += change.size
            most = max(most, self._held)
        self._counted = len(self._record.changes)
        return most
