"""Tensors that modules save for backward wait for it in host memory.

After a module's call, the storages that it has saved are copied to the host on a separate stream, while the next module
computes. After that one's call, the current stream waits for the copies and the storages are released: later operators
may use their memory, and the host has not waited. In backward the first tensor of a module begins the copies back of
the ``depth`` modules before it. The last ``depth`` modules of a forward (of each pipeline stage), which backward needs
first, keep their tensors on the device.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from ds_npu.log import logger
from ds_npu.memory.copy_streams import CopyStreams, Times
from ds_npu.memory.held_tensor import HeldTensor, ModifiedTensorError, alias, keep
from ds_npu.memory.host_storage import HostAllocator, HostStorage, StorageCopy
from ds_npu.parallel.runtime.micro_batch import Fact
from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute

LEAST_BYTES = 2**20
"""Least bytes of a storage that is swapped: a smaller one takes longer to begin than to copy."""
MOST_DEPTH = 4
TIMED_FORWARD = 1
"""The forward, after the first, whose copies are timed."""


class SwappedStorage:
    """One storage: on the device, on its way to the host, there, and on the device again.

    It lives as long as a tensor in it is saved for backward; then its host memory is given back.
    """

    def __init__(self, tensor: torch.Tensor, streams: CopyStreams, host: HostAllocator) -> None:
        self.size = tensor.untyped_storage().nbytes()
        self.version = tensor._version
        self._shape = tensor.shape
        self._device = tensor.device
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
        """Return the copy back to the device; None where the storage is there, or on its way."""
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


class ActivationSwap:
    """The streams, the host memory and the depth of one model, some of whose modules are swapped."""

    def __init__(
        self,
        device_type: str,
        ends: Sequence[int],
        hidden_only: bool = False,
        depth: int | None = None,
        compresses: bool = False,
        share: float = 1.0,
    ) -> None:
        """``ends``: the number of modules up to the end of each pipeline stage of the rank.

        ``hidden_only``: once times are known, only so much of each module is copied that a copy takes no longer than
        the module computes. ``share``: forwards that wait at a time on this pipeline rank, over the most of any rank;
        below 1, only so much is copied that as many bytes remain on the device as on the rank with the most.

        ``depth``: modules whose copies back are begun ahead; None: as many as needed by the measured times.
        ``compresses``: copies are lossless codes where dtype and size allow.
        """
        self.device_type, self._ends = device_type, tuple(ends)
        # The longest stage limits the depth.
        self._most_depth = max((end - begin for begin, end in zip((0, *ends), ends, strict=False)), default=0) - 1
        self.depth = max(1, min(depth or 1, self._most_depth))
        self._is_depth_given = depth is not None
        self.budget: int | None = None
        """Most bytes of a module that are copied; None: all."""
        self._hidden_only, self._share = hidden_only, share
        self.streams, self.host = CopyStreams(device_type, compresses), HostAllocator(device_type, compresses)
        self._forwards = 0
        self._times: Times = []
        self._timed_bytes = self._timed_copies = 0

    def begin(self) -> SwappedForward:
        """Begin a forward of the model."""
        self._set_depth()
        self._forwards += 1
        return SwappedForward(self, is_timed=self._forwards == 1 + TIMED_FORWARD)

    def timed(self, begin: Times, computed: Times, copied: Times, group: SwapGroup) -> None:
        """Keep the events around a module's computation and copies, to be read when they are over."""
        self._times = [begin[0], computed[0], computed[1], copied[1]]
        self._timed_bytes = group.bytes()
        self._timed_copies = group.copied_bytes

    def _set_depth(self) -> None:
        """Set the depth from measured times, when the timed copies are over."""
        if not self._times or not all(event.query() for event in self._times):
            return
        begin, computed, copy_begun, copied = self._times
        compute_ms = begin.elapsed_time(computed)
        copy_ms = copy_begun.elapsed_time(copied)
        self._times = []
        self.set_speed(compute_ms, copy_ms)
        logger().info(
            "swap.activations: a module computes for %.3g ms and is copied in %.3g ms, %s bytes for %s; copies back "
            "begin %d ahead, and the last %d of %s modules stay on the device, of the others all but %s bytes",
            *(compute_ms, copy_ms, f"{self._timed_copies:,}", f"{self._timed_bytes:,}"),
            *(self.depth, self.depth, self._ends[-1]),
            0 if self.budget is None else f"{self._timed_bytes - self.budget:,}",
        )

    def set_speed(self, compute_ms: float, copy_ms: float) -> None:
        """Set depth and budget: a module computes for ``compute_ms``, its copies took ``copy_ms``."""
        if not (self._hidden_only or self._is_depth_given):
            self.depth = max(1, min(MOST_DEPTH, self._most_depth, math.ceil(copy_ms / max(compute_ms, 1e-3))))
        if self._hidden_only and copy_ms > compute_ms:
            whole = self._timed_bytes
            self.budget = max(0, int(whole - (whole - whole * compute_ms / copy_ms) / self._share))

    def remains(self, index: int) -> bool:
        """Whether the module at ``index``, one of the last of its stage, remains on the device."""
        return next(end for end in self._ends if index < end) - index <= self.depth

    def chosen(self, storages: Iterable[SwappedStorage]) -> list[SwappedStorage]:
        """Choose the storages of one module to copy: within the budget, the largest and so the fewest first."""
        if self.budget is None:
            return list(storages)
        left, found = self.budget, []
        for each in sorted(storages, key=lambda each: -each.size):
            if each.size <= left:
                left -= each.size
                found.append(each)
        return found


class SwapGroup:
    """The storages that one call of a module has saved."""

    def __init__(self, swap: ActivationSwap, remains: bool, kept: Iterable[torch.Tensor]) -> None:
        """``remains``: nothing is copied; ``kept``: tensors that live longer than the call anyway."""
        self._swap, self._remains = swap, remains
        with torch._C.DisableTorchFunctionSubclass():
            self.kept = {each.untyped_storage()._cdata for each in kept}
        self._own: list[SwappedStorage] = []
        """Storages that only this group keeps on the device."""
        self._needed: dict[int, weakref.ref[SwappedStorage]] = {}
        self._copied: torch.Event | None = None
        self.copied_bytes = 0
        self.is_reached = False

    def storage_of(self, tensor: torch.Tensor) -> SwappedStorage | None:
        """Return the SwappedStorage that tensors of one storage share; None where ``tensor`` was modified since."""
        storage = tensor.untyped_storage()
        known = SWAPPED_STORAGE.get(storage)
        found = None if known is None else known()
        if found is not None and found.version != tensor._version:
            return None
        if found is None:
            found = SwappedStorage(tensor, self._swap.streams, self._swap.host)
            SWAPPED_STORAGE.set(storage, weakref.ref(found))
            self._own.append(found)
        self._needed[id(found)] = weakref.ref(found)
        return found

    def copy_out(self) -> None:
        """Begin to copy to the host, after the module's call."""
        if self._remains:
            self._own.clear()
            return
        copies = {each: each.begin_copy() for each in self._swap.chosen(self._own)}
        self._own = [each for each, copy in copies.items() if copy is not None]
        begun = [copy for copy in copies.values() if copy is not None]
        self.copied_bytes = sum(copy.host.size for copy in begun)
        self._copied = self._swap.streams.copy_out(begun)

    def bytes(self) -> int:
        """Bytes of the storages that are copied and not released."""
        return sum(each.size for each in self._own)

    def release(self) -> None:
        """Release the copied storages; the current stream waits for their copies."""
        if self._own:
            self._swap.streams.wait(self._copied)
        for each in self._own:
            each.release()
        self._own.clear()

    def copy_back(self) -> None:
        """Begin to copy the storages on the host back."""
        there = [each for each in (known() for known in self._needed.values()) if each is not None]
        copies = {each: copy for each in there if (copy := each.begin_return()) is not None}
        if copies:
            event = self._swap.streams.copy_back(list(copies.values()))
            for each, copy in copies.items():
                each.arrives(copy.data, event)


class SwappedForward:
    """One forward of a model."""

    def __init__(self, swap: ActivationSwap, is_timed: bool) -> None:
        self._swap, self._is_timed = swap, is_timed
        self._groups: list[SwapGroup] = []
        self._open: SwapGroup | None = None

    @contextmanager
    def call(self, index: int, kept: Iterable[torch.Tensor]) -> Iterator[None]:
        """A context for the call of the module at ``index`` among all swapped ones."""
        depth = self._swap.depth
        streams = self._swap.streams
        remains = self._swap.remains(index)
        group = SwapGroup(self._swap, remains, kept)
        around = self._open
        self._groups.append(group)
        begin = streams.mark() if self._is_timed and not remains else []
        self._open = group
        try:
            yield
        finally:
            self._open = around
        computed = streams.mark() if begin else []
        group.copy_out()
        if begin:
            self._swap.timed(begin, computed, streams.mark(), group)
        if len(self._groups) > depth:
            self._groups[-1 - depth].release()

    def close(self) -> None:
        """End the forward."""
        for group in self._groups:
            group.release()

    def hold(self, tensor: torch.Tensor) -> HeldTensor:
        """Hold ``tensor``, which is saved for backward."""
        group = self._open
        with torch._C.DisableTorchFunctionSubclass():
            if group is None or not can_be_swapped(tensor, self._swap.device_type, group.kept):
                return keep(tensor)
            storage = group.storage_of(tensor)
            if storage is None:
                return keep(tensor)
            index = len(self._groups) - 1
            offset = int(tensor.storage_offset())
            return SwappedTensor(
                storage,
                lambda: self._reach(index),
                *(tensor.dtype, tensor.shape, tensor.stride(), offset, tensor.requires_grad),
            )

    def _reach(self, index: int) -> None:
        """Begin copies back: backward has reached the call at ``index``."""
        if self._groups[index].is_reached:
            # A retained graph leaves its storages on the device.
            return
        for group in reversed(self._groups[max(0, index - self._swap.depth) : index + 1]):
            group.copy_back()
        self._groups[index].is_reached = True


def can_be_swapped(tensor: torch.Tensor, device_type: str, kept: Collection[int]) -> bool:
    """Whether ``tensor`` is an activation of the device, large enough, and not a weight or part of one."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == device_type
        and tensor.layout is torch.strided
        and not (tensor.is_leaf and tensor.requires_grad)
        and not isinstance(tensor._base, nn.Parameter)
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage().nbytes() >= LEAST_BYTES
        and tensor.untyped_storage()._cdata not in kept
    )


SWAPPED_FORWARD: Fact[SwappedForward] = Fact(while_running=True)
