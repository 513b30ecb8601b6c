"""Estimates how long a forward's operators take on a machine, by their shapes: a roofline, no clock.

An operator takes as long as its products of matrices on whole tiles of the cube cores, or as it reads its arguments and
writes its results, whichever is longer, and a kernel's time besides. Views and allocations take no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ds_npu.memory.storage_record import has_storage
from ds_npu.parallel.runtime.calls import Arguments, Keywords
from ds_npu.topology.machine import Machine

ATTENTION, GROUPED, LINEAR = "attention", "grouped_m", "npu_linear"
"""Parts of the names of operators whose FLOP torch's counter does not know for every device."""
KEYS_DIM = {"BSH": 1, "BSND": 1, "SBH": 0, "BNSD": 2, "TND": 0}
"""The dim of the keys in torch_npu's layouts of attention."""
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
"""Products of two matrices, or of two batches of them."""
GATHERING = ("aten::embedding", "aten::index_select", "aten::gather", "aten::take", "aten::index")
"""Operators that read those elements of a tensor that an index names: as many as they return."""
SCATTERING = {
    "aten::index_put_": 2,
    "aten::put_": 2,
    "aten::scatter_": 3,
    "aten::scatter_reduce_": 3,
    "aten::index_copy_": 3,
}
"""Operators that write the elements that an index names, and the position of their argument with as many elements."""
SORTING = ("aten::sort", "aten::topk", "aten::kthvalue", "aten::median")
"""Operators that read and write their tensors in several passes."""
OVERWRITING = (
    "aten::zero_",
    "aten::fill_",
    "aten::copy_",
    "aten::uniform_",
    "aten::normal_",
    "aten::random_",
    "aten::bernoulli_",
)
"""Operators that do not read their first argument."""
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
    moved = float(_moved_bytes(name, args, kwargs, out))
    if name.startswith("c10d"):
        return machine.message + moved / machine.port
    passes = machine.sorting_passes if name in SORTING else 1
    return machine.operator_seconds(_product_seconds(func, args, kwargs, out, machine), passes * moved)


def _moved_bytes(name: str, args: Arguments, kwargs: Keywords, out: Any) -> int:
    """Bytes that the operator ``name`` reads and writes."""
    if name in GATHERING:
        return 2 * _bytes(out)
    if name in SCATTERING:
        return 2 * _bytes(
            next(each for each in reversed(args[: SCATTERING[name] + 1]) if isinstance(each, torch.Tensor))
        )
    read = args[name in OVERWRITING :], [value for key, value in kwargs.items() if key != "out"]
    return sum(map(_bytes, (*_tensors(read), *_tensors(out))))


def _product_seconds(func: OpOverload, args: Arguments, kwargs: Keywords, out: Any, machine: Machine) -> float:
    name: str = func._schema.name
    tensors = list(_tensors((args, kwargs)))
    if ATTENTION in name and len(tensors) > 1:
        q, k = tensors[:2]
        layout = next((each for each in args if isinstance(each, str) and each in KEYS_DIM), "BNSD")
        keys = k.shape[KEYS_DIM[layout]]
        # Two products, of scores and of sums; a causal mask leaves half.
        return machine.attention_seconds(2.0 * q.numel() * keys, keys)
    if GROUPED in name and len(tensors) > 1:
        x, weight = tensors[:2]
        groups = math.prod(weight.shape[:-2])
        rows = math.ceil(math.prod(x.shape[:-1]) / groups)
        return machine.product_seconds(rows, weight.shape[-1], x.shape[-1], x.itemsize, groups)
    if LINEAR in name and len(tensors) > 1:
        x, weight = tensors[:2]
        return machine.product_seconds(math.prod(x.shape[:-1]), weight.shape[0], x.shape[-1], x.itemsize)
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return 0.0
    flop = count(*args, **kwargs, out_val=out)
    if name not in PRODUCTS:
        return float(flop / machine.matmul)
    inner = flop // (2 * out.numel()) if out.numel() else 0
    rows, columns = out.shape[-2:]
    return machine.product_seconds(rows, columns, inner, out.itemsize, math.prod(out.shape[:-2]))


def _is_view(func: OpOverload) -> bool:
    """Whether ``func`` returns a view of an argument that it does not write."""
    aliases = [each.alias_info for each in func._schema.returns]
    return any(each is not None and not each.is_write for each in aliases)


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of ``tensor``, each element of a broadcast one once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.itemsize


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, torch.Tensor) and each.numel() > 0)
