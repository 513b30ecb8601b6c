"""A copy in host memory of nested dicts with tensors, as they are now, while training goes on.

From a device the bytes go to pinned memory on a stream of their own. They have arrived when ``wait`` returns, and what
is queued behind ``hold_back`` on the computing stream may write to the tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class HostSnapshot:
    """One snapshot at a time; its memory is kept for the next one.

    Tensors on ``device_type`` are copied behind other work, tensors on the host at once.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._copies: dict[int, torch.Tensor] = {}
        """The copy of each storage in host memory, [bytes] uint8, by the storage's address."""
        self._sources: list[torch.Tensor] = []
        self._used: list[tuple[tuple[int, bool], torch.Tensor]] = []
        """The memory of this snapshot: ((bytes, whether it is pinned), tensor)."""
        self._free: dict[tuple[int, bool], list[torch.Tensor]] = {}
        self._stream: torch.Stream | None = None
        self._arrived: torch.Event | None = None

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that are kept."""
        used = sum(each.numel() for _, each in self._used)
        return used + sum(each.numel() for same in self._free.values() for each in same)

    def of(self, content: Any, at_once: Set[int] = frozenset()) -> Any:
        """A copy of ``content`` whose tensors are on the host and share storages as they did.

        ``at_once``: data pointers of storages that a forward may write to, which the computing stream copies itself.
        """
        if isinstance(content, torch.Tensor):
            return self._tensor(content, at_once)
        if isinstance(content, dict):
            made = copy.copy(content)
            for key, each in content.items():
                made[key] = self.of(each, at_once)
            return made
        if type(content) in (list, tuple):
            return type(content)(self.of(each, at_once) for each in content)
        return copy.deepcopy(content)

    def memory_like(self, x: torch.Tensor) -> torch.Tensor:
        """Host memory of the shape and dtype of ``x``, to be written to within ``behind``; ``x`` is contiguous.

        ``of`` does not copy it once more. Nobody may read it before ``wait`` has returned.
        """
        target = self._host_memory(x.numel() * x.element_size(), pinned=self._device_type != "cpu")
        self._copies[target.untyped_storage()._cdata] = target
        return target.view(x.dtype).view(x.shape)

    @contextmanager
    def behind(self) -> Iterator[None]:
        """A context that queues operations on the stream of copies, behind those of the computing stream."""
        if self._device_type == "cpu":
            yield
            return
        device = torch.get_device_module(self._device_type)
        if self._stream is None:
            self._stream = device.Stream()
        self._stream.wait_stream(device.current_stream())
        with device.stream(self._stream):
            yield

    def keep(self, source: torch.Tensor) -> None:
        """Keep the allocator from giving the memory of ``source`` away before the stream of copies has read it."""
        if self._stream is not None and source.device.type == self._device_type:
            source.record_stream(self._stream)

    def finish(self) -> None:
        """Record the event after which all copies have arrived."""
        if self._stream is not None:
            self._arrived = self._stream.record_event()

    def hold_back(self) -> None:
        """Let the computing stream wait until the copies have left the device; the host does not wait."""
        if self._arrived is not None:
            torch.get_device_module(self._device_type).current_stream().wait_event(self._arrived)
        self._sources.clear()

    def wait(self) -> None:
        """Wait on the host until all bytes are there."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def release(self) -> None:
        """Give the memory to the next snapshot."""
        for key, each in self._used:
            self._free.setdefault(key, []).append(each)
        self._used.clear()
        self._copies.clear()

    def _tensor(self, tensor: torch.Tensor, at_once: Set[int]) -> torch.Tensor:
        if tensor.layout != torch.strided:
            return tensor.detach().to("cpu", copy=True)
        with torch._C.DisableTorchFunctionSubclass():
            plain = tensor.detach()
            storage = plain.untyped_storage()
            if storage.nbytes() == 0:
                made = torch.empty(plain.shape, dtype=plain.dtype)
            else:
                held = self._copy_of(storage, at_once).untyped_storage()
                made = torch.empty(0, dtype=plain.dtype)
                made.set_(held, plain.storage_offset(), plain.shape, plain.stride())
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    def _copy_of(self, storage: torch.UntypedStorage, at_once: Set[int]) -> torch.Tensor:
        known = self._copies.get(storage._cdata)
        if known is not None:
            return known
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        is_here = storage.device.type == "cpu"
        target = self._host_memory(storage.nbytes(), pinned=not is_here)
        if is_here:
            target.copy_(source)
        elif storage.data_ptr() in at_once:
            target.copy_(source, non_blocking=True)
        else:
            with self.behind():
                target.copy_(source, non_blocking=True)
            self.keep(source)
        self._copies[storage._cdata] = target
        # A storage that is freed before the snapshot ends could give its number to another one.
        self._sources.append(source)
        return target

    def _host_memory(self, nbytes: int, pinned: bool) -> torch.Tensor:
        free = self._free.get((nbytes, pinned))
        memory = free.pop() if free else torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._used.append(((nbytes, pinned), memory))
        return memory
