"""Asynchronous copies between host and device, through pinned memory, which can run out as a device's can."""

from __future__ import annotations

import torch


def pinned(made: torch.Tensor) -> torch.Tensor:
    """Return ``made``, a tensor in pinned memory; raise MemoryError where the host had none left for it.

    torch_npu (2.13) then returns a tensor at address 0 and says nothing; what is copied to it kills the process.
    """
    if made.data_ptr() == 0 and made.nbytes:
        raise MemoryError(
            f"out of memory of the host: {made.nbytes:,} bytes could not be pinned. What to do: more memory for this "
            "machine or container, a higher limit of locked memory (ulimit -l), or less of what ds_npu.swap and "
            "ds_npu.optimizer_memory.swap keep there"
        )
    return made


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
