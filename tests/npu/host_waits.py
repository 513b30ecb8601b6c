"""Counts the operations for which the host waits for an NPU."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HostWaits(TorchDispatchMode):
    """The operations for which the host needs a device's numbers, while it is entered; those of backward, too."""

    NEED = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.awaited_later: list[str] = []
        """Copies into pinned memory, for which the host waits later, or never."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        from_device = any(each.device.type == "npu" for each in tensors)
        to_host = isinstance(out, torch.Tensor) and out.device.type == "cpu" and not func._opname.startswith("empty")
        asynchronous = func._opname == "copy_" and (args[2:3] == (True,) or (kwargs or {}).get("non_blocking", False))
        if asynchronous and to_host and out.is_pinned():
            self.awaited_later.append(func._opname)
            return out
        if from_device and (to_host or func._opname in self.NEED):
            self.found.append(func._opname)
        return out
