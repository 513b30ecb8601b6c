"""Counts the operations for which the host waits for an NPU."""

from __future__ import annotations

import deepspeed
import gradient_rule as rule
import pytest
import tensor_parallel_rule as tensor_rule
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


def check_no_wait(engine: deepspeed.DeepSpeedEngine) -> None:
    """Let torch_npu raise where the host waits, from the first block to the end of backward.

    Before, transformers looks for packed sequences, on the host. torch_npu overlooks copies, HostWaits does not.
    """
    ids = tensor_rule.batches(rule.MICRO).to(engine.device)
    try:
        with engine.module.model.layers[0].register_forward_pre_hook(lambda *_: torch.npu.set_sync_debug_mode("error")):
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
        with pytest.raises(RuntimeError, match="synchronizing"):
            loss.item()
    finally:
        torch.npu.set_sync_debug_mode("default")
