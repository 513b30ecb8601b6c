"""Results of chosen operators that are kept where all else is computed again in backward.

Below autograd, a dispatch mode sees each operator that a call of a part of a model runs. In forward it keeps the
results of the chosen ones; when the part is computed again, it returns these and does not run the operators. An
operator whose result was modified since runs again. Source: the idea of torch.utils.checkpoint's selective policies;
those keep the results of a part's last operators, too, which nothing in backward needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ds_npu.memory.held_tensor import HeldTensor, KeptTensor, ModifiedTensorError, alias
from ds_npu.parallel.runtime.calls import Arguments, Keywords
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
"""Operators of torch and torch_npu by the names of ``ds_npu.recompute.keep``."""


@dataclass
class _Result:
    operator: str
    value: Any
    """The operator's result, its tensors as HeldTensors; None: another operator may have written to them."""
    random: States | None
    """The states of the random generators after the operator, if it draws from them."""
    aliases: list[KeptTensor] = field(default_factory=list)
    """Version counters, without memory, of tensors that share the result's storage but not its counter."""


class KeptResults:
    """The results of one call of a part of a model, in order."""

    def __init__(self, kinds: Iterable[str], device_type: str) -> None:
        """``kinds``: keys of OPERATORS."""
        self.operators = frozenset(name for kind in kinds for name in OPERATORS[kind])
        self.device_type = device_type
        self.results: list[_Result] = []
        self._needed = 0

    def need(self) -> None:
        """Mark the results kept so far as needed in backward."""
        self._needed = len(self.results)

    def close(self) -> None:
        """End the call: drop the results that nothing in backward needs."""
        del self.results[self._needed :]


class Recording(TorchDispatchMode):
    """Keeps the results of chosen operators; ``hold`` makes the substitute of a tensor."""

    def __init__(self, kept: KeptResults, hold: Callable[[torch.Tensor], HeldTensor]) -> None:
        TorchDispatchMode.__init__(self)
        self._kept, self._hold = kept, hold
        self._of_storage: dict[int, _Result] = {}

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Iterable[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        kept = self._kept
        found = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in kept.operators and not func._schema.is_mutable:
            value = tree_map(lambda each: self._hold(alias(each)) if isinstance(each, torch.Tensor) else each, found)
            draws = torch.Tag.nondeterministic_seeded in func.tags
            random = generator_states(kept.device_type) if draws else None
            kept.results.append(_Result(name, value, random))
            self._of_storage |= dict.fromkeys(_storages(found), kept.results[-1])
        elif name.startswith("c10d::"):
            # It may write to the results that it is given, and does not declare so.
            for storage in self._of_storage.keys() & _storages(args).keys():
                self._of_storage[storage].value = None
        elif not (func.is_view or func._schema.is_mutable):
            self._watch(found)
        return found

    def _watch(self, found: Any) -> None:
        """Watch undeclared views of results: aten::_unsafe_view, of which torch.matmul makes its result."""
        for storage, tensor in _storages(found).items():
            if storage in self._of_storage:
                count = alias(tensor)
                count.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                self._of_storage[storage].aliases.append(KeptTensor(count, tensor._version, is_detached=False))


class Replaying(TorchDispatchMode):
    """Returns the kept results, in order, instead of running their operators."""

    def __init__(self, kept: KeptResults) -> None:
        TorchDispatchMode.__init__(self)
        self._kept, self._next = kept, 0

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Iterable[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        kept, name = self._kept, func._schema.name
        if name not in kept.operators or func._schema.is_mutable or self._next == len(kept.results):
            return func(*args, **(kwargs or {}))
        found = kept.results[self._next]
        self._next += 1
        if found.operator != name:
            raise RuntimeError(f"{name} is called where {found.operator} was, when it is computed again")
        value = _value(found)
        if value is None:
            return func(*args, **(kwargs or {}))
        if found.random is not None:
            restore_generators(kept.device_type, found.random)
        return value


def _value(result: _Result) -> Any:
    """Return the result; None where it was modified since."""
    try:
        for each in result.aliases:
            each.get()
        return tree_map(lambda each: each.get().detach() if isinstance(each, HeldTensor) else each, result.value)
    except ModifiedTensorError:
        return None


def _storages(found: Any) -> dict[int, torch.Tensor]:
    return {each.untyped_storage()._cdata: each for each in tree_leaves(found) if isinstance(each, torch.Tensor)}
