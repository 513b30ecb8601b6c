"""Results of chosen operators that are kept where all else is computed again in backward.

A dispatch mode sees each operator that a call of a part of a model runs, below autograd. In forward it keeps what the
chosen ones return; when the call is made again they are not run, and return that. A result that something has modified
since is not used: its operator is run again. Source: the idea of torch.utils.checkpoint's selective policies; those
keep the results of a part's last operators, too, which nothing in backward needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ds_npu.memory.held_tensor import HeldTensor, KeptTensor, ModifiedTensorError, alias
from ds_npu.parallel.tensor.randomness import States, generator_states, restore_generators

MATMUL = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear", "aten::_grouped_mm"),
    *("npu::npu_linear", "npu::npu_bmmV2", "npu::npu_grouped_matmul"),
)
ATTENTION = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "npu::npu_fusion_attention",
    "npu::npu_fusion_attention_v2",
)
OPERATORS: dict[str, tuple[str, ...]] = {"matmul": MATMUL, "attention": ATTENTION}
"""By what ``ds_npu.recompute.keep`` names, operators of torch and torch_npu."""


@dataclass
class _Result:
    operator: str
    value: Any
    """What the operator returned, its tensors as HeldTensors; None: another operator may have written to them."""
    random: States | None
    """The state of the random generators behind it, where it draws from them."""
    aliases: list[KeptTensor] = field(default_factory=list)
    """Without memory: modifications of tensors that share the result's storage and count their own."""


class KeptResults:
    """The results of one call of a part of a model, in order."""

    def __init__(self, kinds: Iterable[str], device_type: str) -> None:
        """``kinds``: keys of OPERATORS."""
        self.operators = frozenset(name for kind in kinds for name in OPERATORS[kind])
        self.device_type = device_type
        self.results: list[_Result] = []
        self._needed = 0

    def need(self) -> None:
        """What was kept until now is needed in backward."""
        self._needed = len(self.results)

    def close(self) -> None:
        """The call is over: forget what nothing behind it needs."""
        del self.results[self._needed :]


class Recording(TorchDispatchMode):
    """Keeps results; ``hold`` makes of a tensor what stands for it."""

    def __init__(self, kept: KeptResults, hold: Any) -> None:
        upstream: Any = super()
        upstream.__init__()
        self._kept, self._hold = kept, hold
        self._of_storage: dict[int, _Result] = {}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kept = self._kept
        found = func(*args, **(kwargs or {}))
        name = _name(func)
        if name in kept.operators and not func._schema.is_mutable:
            value = tree_map(lambda each: self._hold(alias(each)) if isinstance(each, torch.Tensor) else each, found)
            draws = torch.Tag.nondeterministic_seeded in func.tags
            random = generator_states(kept.device_type) if draws else None
            kept.results.append(_Result(name, value, random))
            self._of_storage |= dict.fromkeys(_storages(found), kept.results[-1])
        elif name.startswith("c10d::"):
            self._forget(args)
        elif not (func.is_view or func._schema.is_mutable):
            self._watch(found)
        return found

    def _forget(self, args: tuple[Any, ...]) -> None:
        """A collective may write to what it is given, and does not say so."""
        for storage in _storages(args):
            if storage in self._of_storage:
                self._of_storage[storage].value = None

    def _watch(self, found: Any) -> None:
        """An operator may return a view and not say so: aten::_unsafe_view, of which torch.matmul makes its result."""
        for storage, tensor in _storages(found).items():
            if storage in self._of_storage:
                count = alias(tensor)
                count.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                self._of_storage[storage].aliases.append(KeptTensor(count, tensor._version, is_detached=False))


class Replaying(TorchDispatchMode):
    """Returns the results that were kept, in order, in place of running their operators."""

    def __init__(self, kept: KeptResults) -> None:
        upstream: Any = super()
        upstream.__init__()
        self._kept, self._place = kept, 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kept, name = self._kept, _name(func)
        if name not in kept.operators or func._schema.is_mutable or self._place == len(kept.results):
            return func(*args, **(kwargs or {}))
        found = kept.results[self._place]
        self._place += 1
        if found.operator != name:
            raise RuntimeError(f"{name} is called where {found.operator} was, when it is computed again")
        value = _value(found)
        if value is None:
            return func(*args, **(kwargs or {}))
        if found.random is not None:
            restore_generators(kept.device_type, found.random)
        return value


def _value(result: _Result) -> Any:
    """What was returned; None where it is not any more."""
    try:
        for each in result.aliases:
            each.get()
        return tree_map(lambda each: each.get().detach() if isinstance(each, HeldTensor) else each, result.value)
    except ModifiedTensorError:
        return None


def _storages(found: Any) -> dict[int, torch.Tensor]:
    """The tensors in ``found`` by their storages."""
    return {each.untyped_storage()._cdata: each for each in tree_leaves(found) if isinstance(each, torch.Tensor)}


def _name(func: Any) -> str:
    name: str = func.name()
    return name.partition(".")[0]
