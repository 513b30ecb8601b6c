"""Estimates how long a forward's operators take on a machine, by their shapes: a roofline, no clock.

An operator takes as long as its products of matrices at the machine's rate, or as it reads its arguments and writes its
results, whichever is longer, and at least as long as a small kernel. Views and allocations take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ds_npu.memory.storage_record import has_storage
from ds_npu.parallel.tensor.shard_access import Arguments, Keywords
from ds_npu.topology.machine import Machine

ATTENTION, GROUPED, LINEAR = "attention", "grouped_m", "npu_linear"
"""Parts of the names of operators whose FLOP torch's counter does not know for every device."""
KEYS_DIM = {"BSH": 1, "BSND": 1, "SBH": 0, "BNSD": 2, "TND": 0}
"""The dim of the keys in torch_npu's layouts of attention."""
MADE = ("aten::empty", "aten::new_empty", "aten::detach", "aten::set_", "aten::resize_")
"""Beginnings of the names of operators that start no kernel."""


class OperatorSeconds(TorchDispatchMode):
    """Calls ``seen`` with the estimated seconds of each operator that runs while it is entered."""

    def __init__(self, machine: Machine, seen: Callable[[float], None]) -> None:
        TorchDispatchMode.__init__(self)
        self._machine, self._seen = machine, seen

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        if not all(map(has_storage, types)):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._seen(operator_seconds(func, args, kwargs, out, self._machine))
        return out


def operator_seconds(func: OpOverload, args: Arguments, kwargs: Keywords, out: Any, machine: Machine) -> float:
    """Estimate one call of the operator ``func``, which returned ``out``."""
    name: str = func._schema.name
    if _is_view(func) or name.startswith(MADE):
        return 0.0
    moved = sum(each.nbytes for each in (*_tensors((args, kwargs)), *_tensors(out)))
    if name.startswith("c10d"):
        return machine.message + float(moved) / machine.port
    product = _product_seconds(func, args, kwargs, out, machine)
    return float(max(product, moved / machine.memory, machine.kernel))


def _product_seconds(func: OpOverload, args: Arguments, kwargs: Keywords, out: Any, machine: Machine) -> float:
    name: str = func._schema.name
    tensors = list(_tensors((args, kwargs)))
    if ATTENTION in name and len(tensors) > 1:
        q, k = tensors[:2]
        layout = next((each for each in args if isinstance(each, str) and each in KEYS_DIM), "BNSD")
        keys = k.shape[KEYS_DIM[layout]]
        # Two products, of scores and of sums; a causal mask leaves half.
        return float(2 * q.numel() * keys / machine.attention_rate(keys))
    if GROUPED in name and len(tensors) > 1:
        return float(2 * tensors[0].numel() * tensors[1].shape[-1] / machine.matmul)
    if LINEAR in name and len(tensors) > 1:
        return float(2 * tensors[0].numel() * tensors[1].shape[0] / machine.matmul)
    count = flop_registry.get(func._overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=out) / machine.matmul)


def _is_view(func: OpOverload) -> bool:
    """Whether ``func`` returns a view of an argument that it does not write."""
    aliases = [each.alias_info for each in func._schema.returns]
    return any(each is not None and not each.is_write for each in aliases)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, torch.Tensor) and each.numel() > 0)
