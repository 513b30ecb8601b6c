"""Finds, while a micro-batch runs again, the operators that make what is not finite out of finite tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_npu.features.recorded_calls.module_calls import ModuleCall, ModuleCalls
from ds_npu.features.recorded_calls.plain_data import Plain, as_plain
from ds_npu.features.recorded_calls.tensor_statistics import MINUS_INF, is_float, kinds_in, named_leaves
from ds_npu.memory.storage_record import has_storage
from ds_npu.parallel.runtime.calls import Arguments, Keywords
from ds_npu.parallel.tensor.shard_access import local_shard

FILLS = ("full", "new_full", "full_like", "fill", "fill_", "scalar_tensor", "masked_fill", "masked_fill_")
"""Operators that write the caller's number, which may be -inf, or NaN where nobody may read, on purpose."""
UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_")
"""Operators that return memory without writing it."""
COMPUTES = ("aten", "npu", "ds_npu")
"""Namespaces of operators; those of collectives return before their result is there."""
MOST = 64
"""The most wrong operators of a run that are kept."""


@dataclass(frozen=True)
class WrongOperator:
    """An operator that has made what is not finite out of finite tensors; or a weight or argument that is not finite.

    Values of -inf alone may be wanted (masks): they count only where no other is found.
    """

    number: int
    """Its number among those of its run."""
    operator: str
    """``aten.exp.default``, or "its weight ..." or "an argument ..."."""
    kinds: tuple[str, ...]
    """The kinds NAN, INF and MINUS_INF that it made."""
    is_backward: bool
    order: int
    """The number of the module's call in the order of execution; in backward the last one comes first."""
    module: str
    """The module and its class, in words."""
    name: str
    call: int
    """The number of earlier calls of the module in the run."""
    micro_batch: int | None = None
    """The number of the micro-batch in a pipeline."""
    reaches_the_end: bool = True
    """Whether what is not finite is in the outputs of all modules around it."""
    others: tuple[str, ...] = ()
    """The next operators of the same call, in words."""

    @property
    def is_strong(self) -> bool:
        return self.is_backward or self.kinds != (MINUS_INF,)

    def __str__(self) -> str:
        return f"{self.operator} gave {', '.join(self.kinds)}"


class WrongOperators(TorchDispatchMode):
    """Records wrong operators of ``calls`` while it is entered; of the one with number ``kept`` also the arguments.

    The host waits for the device at each operator.
    """

    def __init__(self, calls: ModuleCalls, kept: int | None = None) -> None:
        TorchDispatchMode.__init__(self)
        self.found: list[tuple[WrongOperator, ModuleCall | None]] = []
        self.kept_call: Plain = None
        """Operator, arguments and result, copied at once: both may be overwritten."""
        self._calls, self._kept = calls, kept
        calls.entered = self._look_at_weights
        calls.left = self._look_at_output

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Iterable[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        if not all(map(has_storage, types)):
            return NotImplemented
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if func.namespace not in COMPUTES or name in FILLS or name in UNWRITTEN or len(self.found) >= MOST:
            return func(*args, **kwargs)
        writes = func._schema.is_mutable
        given = (args, {key: each for key, each in kwargs.items() if not (writes and key.startswith("out"))})
        with torch._C.DisableTorchFunctionSubclass():
            before = _kinds(given) if writes else None
            if writes and self._kept is not None:
                given = _copied(given)
            result = func(*args, **kwargs)
            made = _kinds((result, args, kwargs) if writes else result)
            if made:
                came = _kinds(given) if before is None else before
                if came <= {MINUS_INF} and made - came:
                    self._note(str(func), tuple(sorted(made)), {"args": given[0], "kwargs": given[1], "result": result})
        return result

    def _note(self, operator: str, kinds: tuple[str, ...], call: dict[str, Any] | None) -> None:
        within, is_backward = self._calls.current()
        found = WrongOperator(
            len(self.found),
            operator,
            kinds,
            is_backward,
            -1 if within is None else within.index,
            "no module" if within is None else str(within),
            "" if within is None else within.name,
            0 if within is None else within.number,
            None if within is None else within.micro_batch,
        )
        if found.number == self._kept:
            self.kept_call = None if call is None else {"operator": operator, **as_plain(call)}
        self.found.append((found, within))

    def _look_at_weights(self, call: ModuleCall, module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        with self._at_rest():
            for name, weight in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                values = local_shard(weight)
                kinds = kinds_in(values) if is_float(values) else ()
                if kinds not in ((), (MINUS_INF,)):
                    self._note(_in_words(name, weight, values), kinds, None)
            if call.caller is None and not call.is_recomputed:
                for path, leaf in named_leaves({**kwargs, "args": args}):
                    kinds = kinds_in(leaf)
                    if kinds not in ((), (MINUS_INF,)):
                        self._note(f"the argument {path} of the model", kinds, None)

    def _look_at_output(self, call: ModuleCall, module: nn.Module, output: Any) -> None:
        with self._at_rest():
            leaves = [leaf for leaf in tree_leaves(output) if is_float(leaf)]
            call.output_is_wrong = any(kinds_in(leaf) for leaf in leaves) if leaves else None

    def _at_rest(self) -> Any:
        return torch.utils._python_dispatch._disable_current_modes()

    def first(self, *, backward: bool) -> WrongOperator | None:
        """The first wrong operator of the forward or the backward, one that reaches the end of the model before others.

        None where there is none: what is not finite came from another rank, or the run is finite this time.
        """
        of_pass = [(found, call) for found, call in self.found if found.is_backward == backward]
        for wants_strong, wants_end in ((True, True), (True, False), (False, True), (False, False)):
            for found, call in of_pass:
                reaches = backward or call is None or all(each.output_is_wrong is not False for each in call.around)
                if (found.is_strong or not wants_strong) and (reaches or not wants_end):
                    return replace(found, reaches_the_end=reaches, others=tuple(self._others(found)))
        return None

    def _others(self, found: WrongOperator) -> Iterator[str]:
        """The other wrong operators of the same call, in words."""
        call = (found.name, found.call, found.is_backward)
        for other, _ in self.found:
            if other.number != found.number and (other.name, other.call, other.is_backward) == call:
                yield str(other)


def _in_words(name: str, weight: torch.Tensor, values: torch.Tensor) -> str:
    """A weight or buffer in words; of grouped experts [E, K, N] also the first ones whose weights are not finite."""
    wrong = (~values.isfinite()).flatten(1).any(1).nonzero().flatten().tolist() if values.dim() == 3 else []
    experts = f" of expert {', '.join(map(str, wrong[:4]))} on this rank" if wrong else ""
    return f"its {'weight' if isinstance(weight, nn.Parameter) else 'buffer'} {name}{experts}"


def _kinds(tree: Any) -> set[str]:
    found: set[str] = set()
    for leaf in tree_leaves(tree):
        if is_float(leaf):
            found.update(kinds_in(leaf))
    return found


def _copied(tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, tree)
