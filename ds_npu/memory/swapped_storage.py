"""Storages that wait for backward in host memory, and the tensors in them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ds_npu.memory.copy_streams import CopyStreams
from ds_npu.memory.held_tensor import HeldTensor, ModifiedTensorError, alias
from ds_npu.memory.host_place import HostPlace, HostPlaces, StorageCopy
from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute


class SwappedStorage:
    """One storage: on the device, on its way to the host, there, and on the device again.

    It lives as long as a tensor in it is saved for backward; then its place on the host is given back.
    """

    def __init__(self, tensor: torch.Tensor, streams: CopyStreams, places: HostPlaces) -> None:
        """``tensor``: any that has the storage."""
        self.size = tensor.untyped_storage().nbytes()
        self.version = tensor._version
        self._shape, self._device = tensor.shape, tensor.device
        self._streams, self._places = streams, places
        # Without its graph, whose nodes may hold this. Versions are counted together.
        self._held: torch.Tensor | None = alias(tensor)
        self._place: HostPlace | None = None
        self._again: torch.Tensor | None = None
        self._arrived: Any = None
        self._is_used = self._is_modified = False

    def begin_copy(self) -> StorageCopy | None:
        """What is to be copied to the host; None where the tensor has been modified since it was saved."""
        assert self._held is not None
        if self._held._version != self.version:
            self._is_modified = True
            return None
        self._place = self._places.take(self._held)
        return StorageCopy(_bytes(self._held.untyped_storage()), self._place)

    def release(self) -> None:
        """Let go of the storage on the device, which the current stream has waited for being copied."""
        assert self._held is not None
        # A copy that ran beside a change may hold either.
        self._is_modified |= self._held._version != self.version
        self._held = None

    def begin_return(self) -> StorageCopy | None:
        """What is to be copied back; None where it is on the device, or on its way."""
        if self._held is not None or self._again is not None or self._place is None:
            return None
        return StorageCopy(torch.empty(self.size, dtype=torch.uint8, device=self._device), self._place)

    def arrives(self, data: torch.Tensor, event: Any) -> None:
        """``data``, which ``begin_return`` gave, has been copied when ``event`` is over."""
        self._again, self._arrived = data, event

    def on_device(self) -> torch.UntypedStorage:
        """The storage, for the current stream; raises ModifiedTensorError."""
        if self._is_modified or (self._held is not None and self._held._version != self.version):
            raise ModifiedTensorError(self._shape)
        if self._held is not None:
            return self._held.untyped_storage()
        assert self._again is not None
        self._streams.wait(self._arrived)
        self._is_used = True
        return self._again.untyped_storage()

    def __del__(self) -> None:
        # A forward that failed, or a graph that is dropped before its backward: copies may still run.
        if self._held is not None and self._place is not None:
            self._streams.abandon(self._held)
        if self._again is not None and not self._is_used:
            self._streams.abandon(self._again)
        if self._place is not None:
            self._places.give(self._place)


SWAPPED_STORAGE: TensorAttribute[weakref.ref[SwappedStorage]] = TensorAttribute("ds_npu_swapped")
"""Of a storage on the device."""


@dataclass(frozen=True)
class SwappedTensor(HeldTensor):
    """A tensor in a swapped storage."""

    storage: SwappedStorage
    reach: Callable[[], None]
    """Called when backward needs it: copies begin of this and of what is needed next."""
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool

    def get(self) -> torch.Tensor:
        self.reach()
        data = self.storage.on_device()
        made = torch.empty(0, dtype=self.dtype, device=data.device).set_(data, self.offset, self.size, self.stride)
        return made.requires_grad_(self.requires_grad)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of ``storage``: [n] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
