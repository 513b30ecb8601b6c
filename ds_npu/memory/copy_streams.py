"""Copies between a device and the host on two streams of their own, in both directions at once.

A third stream encodes and decodes, so that one storage is coded while another is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch

from ds_npu.memory.host_storage import StorageCopy

Times = list[torch.Event]
"""Timing events on the computing stream and on the stream to the host; none on the CPU."""
SLOTS = 2
"""Codes at a time: one is encoded or decoded while another is copied."""


@dataclass
class StageSlot:
    """Memory for one code at a time: [largest code so far] uint8."""

    memory: torch.Tensor | None = None
    emptied: torch.Event | None = None
    """Recorded after the last operation on the memory."""


class CodeStage:
    """Slots that both directions use alternately; ``stream`` encodes and decodes."""

    def __init__(self, device: ModuleType, copies: Sequence[torch.Stream]) -> None:
        """``device``: torch's module for it; ``copies``: the streams that carry codes to the host and back."""
        self._device = device
        self.stream: torch.Stream = device.Stream()
        self._users = (self.stream, *copies)
        self._slots = deque(StageSlot() for _ in range(SLOTS))

    def take(self, size: int, stream: torch.Stream) -> tuple[StageSlot, torch.Tensor]:
        """Return the next slot and [size] uint8 in it; ``stream`` is the first that writes to it."""
        slot = self._slots[0]
        self._slots.rotate(-1)
        if slot.emptied is not None:
            stream.wait_event(slot.emptied)
        if slot.memory is None or slot.memory.numel() < size:
            slot.memory = None
            with self._device.stream(stream):
                slot.memory = torch.empty(size, dtype=torch.uint8, device=self._device.current_device())
            for each in self._users:
                slot.memory.record_stream(each)
        return slot, slot.memory[:size]


class CopyStreams:
    """The streams of copies. The host waits for none; on the CPU there are no streams, and events are None.

    A tensor must be kept until the current stream has waited for its copy: the allocator gives freed memory to
    operators of that stream, which do not wait for copies. ``abandon`` a tensor that is freed earlier.
    """

    def __init__(self, device_type: str, compresses: bool = False) -> None:
        self.device_type, self._compresses = device_type, compresses

    @cached_property
    def _device(self) -> ModuleType:
        # Not before the first copy: `ds_npu check` changes models where there is no such device.
        module: ModuleType = torch.get_device_module(self.device_type)
        return module

    @cached_property
    def _out(self) -> torch.Stream:
        stream: torch.Stream = self._device.Stream()
        return stream

    @cached_property
    def _back(self) -> torch.Stream:
        stream: torch.Stream = self._device.Stream()
        return stream

    @cached_property
    def _coded(self) -> CodeStage:
        return CodeStage(self._device, (self._out, self._back))

    def copy_out(self, copies: Sequence[StorageCopy]) -> torch.Event | None:
        """Copy to the host what the current stream has computed until now; returns the event of the end."""
        if self.device_type == "cpu":
            for copy in copies:
                copy.encode(copy.host.data)
            return None
        self._wait_for_inputs(self._out, copies)
        if any(copy.host.code for copy in copies):
            self._wait_for_inputs(self._coded.stream, copies)
        try:
            for copy in copies:
                if copy.host.code is None:
                    with self._device.stream(self._out):
                        copy.encode(copy.host.data)
                else:
                    self._encode_and_copy(copy)
        finally:
            event = self._out.record_event()
            _used(copies, event)
        return event

    def copy_back(self, copies: Sequence[StorageCopy]) -> torch.Event | None:
        """Copy from the host into tensors that the current stream has just made; returns the event of the end."""
        if self.device_type == "cpu":
            for copy in copies:
                copy.decode(copy.host.data)
            return None
        # Earlier operators on this memory may still run.
        self._back.wait_stream(self._device.current_stream())
        last = self._back
        if any(copy.host.code for copy in copies):
            last = self._coded.stream
            last.wait_stream(self._device.current_stream())
        try:
            for copy in copies:
                if copy.host.code is None:
                    with self._device.stream(self._back):
                        copy.decode(copy.host.data)
                else:
                    self._copy_and_decode(copy)
        finally:
            if last is not self._back:
                last.wait_stream(self._back)
            event = last.record_event()
            _used(copies, event)
        return event

    def _wait_for_inputs(self, stream: torch.Stream, copies: Sequence[StorageCopy]) -> None:
        """Make ``stream`` wait until the data is computed and no earlier copy uses the buffers."""
        stream.wait_stream(self._device.current_stream())
        for copy in copies:
            for buffer in copy.host.buffers():
                if buffer.used is not None:
                    stream.wait_event(buffer.used)

    def _encode_and_copy(self, copy: StorageCopy) -> None:
        coding = self._coded.stream
        slot, code = self._coded.take(copy.host.size, coding)
        with self._device.stream(coding):
            copy.encode(code)
        self._out.wait_stream(coding)
        with self._device.stream(self._out):
            copy.host.data.copy_(code, non_blocking=True)
        slot.emptied = self._out.record_event()

    def _copy_and_decode(self, copy: StorageCopy) -> None:
        coding = self._coded.stream
        slot, code = self._coded.take(copy.host.size, self._back)
        with self._device.stream(self._back):
            code.copy_(copy.host.data, non_blocking=True)
        coding.wait_stream(self._back)
        with self._device.stream(coding):
            copy.decode(code)
        slot.emptied = coding.record_event()

    def wait(self, event: torch.Event | None) -> None:
        """Make the current stream wait for ``event``."""
        if event is not None:
            self._device.current_stream().wait_event(event)

    def abandon(self, data: torch.Tensor) -> None:
        """Keep the memory of ``data``, which nobody needs any more, until the copies begun so far are done."""
        if self.device_type != "cpu":
            for stream in (self._out, self._back, *([self._coded.stream] if self._compresses else [])):
                data.record_stream(stream)

    def mark(self) -> Times:
        """Record timing events on the current stream, then on the stream to the host; none on the CPU."""
        if self.device_type == "cpu":
            return []
        self._out.wait_stream(self._device.current_stream())
        events: Times = [self._device.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        events[1].record(self._out)
        return events


def _used(copies: Sequence[StorageCopy], event: torch.Event) -> None:
    for copy in copies:
        for buffer in copy.host.buffers():
            buffer.used = event
