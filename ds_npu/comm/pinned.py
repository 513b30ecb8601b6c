"""Pinned memory of the host, which can run out as a device's can."""

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
