"""A number of the device that the host reads when it is there, without waiting for work that was queued after it."""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator

from ds_npu.comm.host_copy import pinned


class DelayedReading:
    """Copies ``scalar`` to the host behind the work that makes it."""

    def __init__(self, scalar: torch.Tensor) -> None:
        scalar = scalar.detach().float()
        self.is_there = scalar.device.type == "cpu"
        if self.is_there:
            self._host = scalar.clone()
            return
        self._host = pinned(get_accelerator().pin_memory(torch.empty((), dtype=torch.float32)))
        self._host.copy_(scalar, non_blocking=True)
        self._copied = get_accelerator().Event()
        self._copied.record()

    def value(self) -> float:
        """The number; waits for the copy, if it has not been made yet."""
        if not self.is_there:
            self._copied.synchronize()
            self.is_there = True
        return self._host.item()
