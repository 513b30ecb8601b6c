"""Copies between a device and the host on two streams of their own, in both directions at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from ds_npu.memory.host_pool import HostBuffer

Copies = Sequence[tuple[torch.Tensor, HostBuffer]]
"""[n] uint8 of the device, and a buffer of at least n bytes."""


class CopyStreams:
    """The host waits for no copy, but on the CPU, where there are no streams and events are None.

    A tensor that is copied must be kept until the current stream has waited for the copy: the allocator gives its
    memory to operators of that stream, which do not wait for these. Where it is not, ``abandon`` it.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    @cached_property
    def _device(self) -> Any:
        # When the first copy asks: `ds_npu check` changes models where there is no such device.
        return None if self.device_type == "cpu" else torch.get_device_module(self.device_type)

    @cached_property
    def _out(self) -> Any:
        return self._device.Stream()

    @cached_property
    def _back(self) -> Any:
        return self._device.Stream()

    def copy_out(self, copies: Copies) -> Any:
        """Copy to the host what the current stream has computed until now; returns the event behind it."""
        if self._device is None:
            for data, buffer in copies:
                buffer.data[: data.numel()].copy_(data)
            return None
        self._out.wait_stream(self._device.current_stream())
        with self._device.stream(self._out):
            for data, buffer in copies:
                if buffer.read is not None:
                    self._out.wait_event(buffer.read)
                buffer.data[: data.numel()].copy_(data, non_blocking=True)
        return self._out.record_event()

    def copy_back(self, copies: Copies) -> Any:
        """Copy from the host into tensors that the current stream has just made; returns the event behind it."""
        if self._device is None:
            for data, buffer in copies:
                data.copy_(buffer.data[: data.numel()])
            return None
        # Operators that had this memory before may still run.
        self._back.wait_stream(self._device.current_stream())
        with self._device.stream(self._back):
            for data, buffer in copies:
                data.copy_(buffer.data[: data.numel()], non_blocking=True)
        event = self._back.record_event()
        for _, buffer in copies:
            buffer.read = event
        return event

    def wait(self, event: Any) -> None:
        """What the current stream computes from now on runs behind ``event``."""
        if event is not None:
            self._device.current_stream().wait_event(event)

    def abandon(self, data: torch.Tensor) -> None:
        """Keep the memory of ``data``, which is not needed any more, until copies that were begun are done."""
        if self._device is not None:
            data.record_stream(self._out)
            data.record_stream(self._back)

    def mark(self) -> tuple[Any, Any] | None:
        """Events that take the time: of the current stream, and of the one to the host behind it; None on the CPU."""
        if self._device is None:
            return None
        self._out.wait_stream(self._device.current_stream())
        events = self._device.Event(enable_timing=True), self._device.Event(enable_timing=True)
        events[0].record()
        events[1].record(self._out)
        return events
