"""Asynchronous copies between host and device."""

from __future__ import annotations

import torch

from ds_npu.comm.pinned import pinned


class HostCopy:
    """A copy of ``x`` to pinned memory; the host waits for it, and for nothing else, when it reads the numbers.

    Kernels that are queued after it on the current stream run while the host reads. CPU tensors are not copied.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self._host, self._event = x, None
        if x.device.type != "cpu":
            self._host = pinned(torch.empty_like(x, device="cpu", pin_memory=True))
            self._host.copy_(x, non_blocking=True)
            self._event = torch.Event(x.device)
            self._event.record()

    def read(self) -> torch.Tensor:
        """Wait for the copy, and return the tensor on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def copy_to_device(indices: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy host indices to ``device`` asynchronously (pinned)."""
    # To copy what is not pinned, torch_npu waits until the stream is done.
    if device.type != "cpu":
        indices = pinned(torch.empty_like(indices, pin_memory=True)).copy_(indices)
    return indices.to(device, non_blocking=True)
