"""Storages that wait for backward in host memory, and the tensors in them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ds_npu.memory.copy_streams import CopyStreams
from ds_npu.memory.held_tensor import HeldTensor, ModifiedTensorError, alias
from ds_npu.memory.host_storage import HostAllocator, HostStorage, StorageCopy
from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute


class SwappedStorage:
    """One storage: on the device, on its way to the host, there, and on the device again.

    It lives as long as a tensor in it is saved for backward; then its host memory is given back.
    """

    def __init__(self, tensor: torch.Tensor, streams: CopyStreams, host: HostAllocator) -> None:
        self.size = tensor.untyped_storage().nbytes()
        self.version = tensor._version
        self._shape, self._device = tensor.shape, tensor.device
        self._streams, self._host = streams, host
        # Without its graph, whose nodes may hold this; the version counter is shared.
        self._held: torch.Tensor | None = alias(tensor)
        self._on_host: HostStorage | None = None
        self._again: torch.Tensor | None = None
        self._arrived: torch.Event | None = None
        self._is_used = self._is_modified = False

    def begin_copy(self) -> StorageCopy | None:
        """Return the copy to the host; None where the tensor has been modified since it was saved."""
        assert self._held is not None
        if self._held._version != self.version:
            self._is_modified = True
            return None
        self._on_host = self._host.take(self._held)
        return StorageCopy(_bytes(self._held.untyped_storage()), self._on_host)

    def release(self) -> None:
        """Release the storage on the device; the current stream has waited for its copy."""
        assert self._held is not None
        # A copy concurrent with a change may hold either value.
        self._is_modified |= self._held._version != self.version
        self._held = None

    def begin_return(self) -> StorageCopy | None:
        """Return the copy back; None where the storage is on the device, or on its way."""
        if self._held is not None or self._again is not None or self._on_host is None:
            return None
        return StorageCopy(torch.empty(self.size, dtype=torch.uint8, device=self._device), self._on_host)

    def arrives(self, data: torch.Tensor, event: torch.Event | None) -> None:
        """Note that ``data``, which ``begin_return`` gave, is copied when ``event`` is over."""
        self._again, self._arrived = data, event

    def on_device(self) -> torch.UntypedStorage:
        """Return the storage, for the current stream; raises ModifiedTensorError."""
        if self._is_modified or (self._held is not None and self._held._version != self.version):
            raise ModifiedTensorError(self._shape)
        if self._held is not None:
            return self._held.untyped_storage()
        assert self._again is not None
        self._streams.wait(self._arrived)
        self._is_used = True
        return self._again.untyped_storage()

    def __del__(self) -> None:
        # After a forward that failed, or a graph dropped before its backward, copies may still run.
        if self._held is not None and self._on_host is not None:
            self._streams.abandon(self._held)
        if self._again is not None and not self._is_used:
            self._streams.abandon(self._again)
        if self._on_host is not None:
            self._host.give(self._on_host)


SWAPPED_STORAGE: TensorAttribute[weakref.ref[SwappedStorage]] = TensorAttribute("ds_npu_swapped")
"""Mark of a storage on the device."""


@dataclass(frozen=True)
class SwappedTensor(HeldTensor):
    """A tensor in a swapped storage."""

    storage: SwappedStorage
    reach: Callable[[], None]
    """Called when backward needs it; begins copies of it and of the tensors needed next."""
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
