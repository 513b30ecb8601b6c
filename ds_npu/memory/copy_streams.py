"""Copies between a device and the host on two streams of their own, in both directions at once.

What is copied as a code is coded on a third one, so that one storage is coded while another is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from ds_npu.memory.code_stage import CodeStage
from ds_npu.memory.host_place import StorageCopy


class CopyStreams:
    """The host waits for no copy, but on the CPU, where there are no streams and events are None.

    A tensor that is copied must be kept until the current stream has waited for the copy: the allocator gives its
    memory to operators of that stream, which do not wait for these. Where it is not, ``abandon`` it.
    """

    def __init__(self, device_type: str, compresses: bool = False) -> None:
        """``compresses``: some copies are of codes."""
        self.device_type, self._compresses = device_type, compresses

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

    @cached_property
    def _coded(self) -> CodeStage:
        return CodeStage(self._device, (self._out, self._back))

    def copy_out(self, copies: Sequence[StorageCopy]) -> Any:
        """Copy to the host what the current stream has computed until now; returns the event behind it."""
        if self._device is None:
            for copy in copies:
                _copy_out_now(copy)
            return None
        self._behind(self._out, copies)
        if any(copy.place.code for copy in copies):
            self._behind(self._coded.stream, copies)
        try:
            for copy in copies:
                if copy.place.code is None:
                    with self._device.stream(self._out):
                        copy.place.home.copy_(copy.data, non_blocking=True)
                else:
                    self._encode_and_copy(copy)
        finally:
            event = self._out.record_event()
            _used(copies, event)
        return event

    def copy_back(self, copies: Sequence[StorageCopy]) -> Any:
        """Copy from the host into tensors that the current stream has just made; returns the event behind it."""
        if self._device is None:
            for copy in copies:
                _copy_back_now(copy)
            return None
        # Operators that had this memory before may still run.
        self._back.wait_stream(self._device.current_stream())
        last = self._back
        if any(copy.place.code for copy in copies):
            last = self._coded.stream
            last.wait_stream(self._device.current_stream())
        try:
            for copy in copies:
                if copy.place.code is None:
                    with self._device.stream(self._back):
                        copy.data.copy_(copy.place.home, non_blocking=True)
                else:
                    self._copy_and_decode(copy)
        finally:
            if last is not self._back:
                last.wait_stream(self._back)
            event = last.record_event()
            _used(copies, event)
        return event

    def _behind(self, stream: Any, copies: Sequence[StorageCopy]) -> None:
        """Let ``stream`` begin when what is copied has been computed, and nothing uses the buffers any more."""
        stream.wait_stream(self._device.current_stream())
        for copy in copies:
            for buffer in copy.place.buffers():
                if buffer.used is not None:
                    stream.wait_event(buffer.used)

    def _encode_and_copy(self, copy: StorageCopy) -> None:
        coding = self._coded.stream
        slot, code = self._coded.take(copy.place.size, coding)
        with self._device.stream(coding):
            copy.encode(code)
        self._out.wait_stream(coding)
        with self._device.stream(self._out):
            copy.place.home.copy_(code, non_blocking=True)
        slot.emptied = self._out.record_event()

    def _copy_and_decode(self, copy: StorageCopy) -> None:
        coding = self._coded.stream
        slot, code = self._coded.take(copy.place.size, self._back)
        with self._device.stream(self._back):
            code.copy_(copy.place.home, non_blocking=True)
        coding.wait_stream(self._back)
        with self._device.stream(coding):
            copy.decode(code)
        slot.emptied = coding.record_event()

    def wait(self, event: Any) -> None:
        """What the current stream computes from now on runs behind ``event``."""
        if event is not None:
            self._device.current_stream().wait_event(event)

    def abandon(self, data: torch.Tensor) -> None:
        """Keep the memory of ``data``, which is not needed any more, until copies that were begun are done."""
        if self._device is not None:
            for stream in (self._out, self._back, *([self._coded.stream] if self._compresses else [])):
                data.record_stream(stream)

    def mark(self) -> tuple[Any, Any] | None:
        """Events that take the time: of the current stream, and of the one to the host behind it; None on the CPU."""
        if self._device is None:
            return None
        self._out.wait_stream(self._device.current_stream())
        events = self._device.Event(enable_timing=True), self._device.Event(enable_timing=True)
        events[0].record()
        events[1].record(self._out)
        return events


def _used(copies: Sequence[StorageCopy], event: Any) -> None:
    for copy in copies:
        for buffer in copy.place.buffers():
            buffer.used = event


def _copy_out_now(copy: StorageCopy) -> None:
    if copy.place.code is None:
        copy.place.home.copy_(copy.data)
    else:
        copy.encode(copy.place.home)


def _copy_back_now(copy: StorageCopy) -> None:
    if copy.place.code is None:
        copy.data.copy_(copy.place.home)
    else:
        copy.decode(copy.place.home)
