"""Records what one call of a block computes and saves for backward, by parts that can be computed again.

An option keeps the storages saved outside of its recomputed parts, and the inputs of these parts, without the outputs
that can be computed again (see ``outputs``). So one call shows what each option would keep, and none has to be tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_npu.config.roles import Role
from ds_npu.features.recompute.outputs import mlp_linears
from ds_npu.memory.operator_seconds import OperatorSeconds
from ds_npu.memory.swapped_activations import can_be_swapped
from ds_npu.models.attributes import remove_attributes, set_attribute
from ds_npu.models.plan import SUBLAYERS, ModelPlan
from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute
from ds_npu.parallel.tensor.linear import ColumnLinear
from ds_npu.planner.memory_plan import Option
from ds_npu.planner.memory_plan_table import ACTIVATION, ATTENTION, MLP, NORM, WHOLE
from ds_npu.topology.machine import Machine

PADDING, ROUNDING = 32, 512
"""Bytes that the NPU allocator adds to a storage, and then rounds up to a multiple of (NPUCachingAllocator)."""

Hook = Callable[..., None]
Bytes = dict[int, int]
"""Bytes of storages, by their number."""
Path = tuple[tuple[str, str], ...]
"""The parts around a call or tensor, outermost first: kind, and name of the module."""


@dataclass
class _Part:
    path: Path
    """The parts around the call; the last one is this part."""
    given: Bytes
    returned: Bytes = field(default_factory=dict)
    """Storages of a norm's output, or of the last linear's input for the activation function."""


_NUMBER: TensorAttribute[int] = TensorAttribute("ds_npu_recorded")
_numbers = itertools.count(1)


class BlockRecord:
    """Records one call of the block ``name``."""

    def __init__(self, model: nn.Module, plan: ModelPlan, name: str, machine: Machine) -> None:
        self.name, self._model, self._plan, self._machine = name, model, plan, machine
        self.module = model.get_submodule(name)
        self.hidden: Bytes = {}
        self._there: Bytes = {}
        """Storages of the block's other arguments, which exist whatever the block keeps."""
        self._saved: list[tuple[Path, Bytes]] = []
        self._seconds: list[tuple[Path, float, int]] = []
        """Path, seconds, and number of tensors saved before, of each operator."""
        self._parts: list[_Part] = []
        self._path: list[tuple[str, str]] = []
        self._swappable: set[int] = set()
        """The storages that swapping copies to the host, by their number."""
        self._stacked: set[int] = set()
        """Joint outputs of MLPs' parallel first linears: a recomputation of the activation function copies them."""

    @property
    def forward_seconds(self) -> float:
        return sum(seconds for _, seconds, _ in self._seconds)

    @contextmanager
    def recording(self, hidden: Any, others: Any) -> Iterator[None]:
        """A context in which the block is called with ``hidden`` states and ``others``."""
        self.hidden, self._there = self._storages(hidden), self._storages(others)
        with ExitStack() as stack:
            self._follow(stack)
            stack.enter_context(OperatorSeconds(self._machine, self._computed))
            yield

    def saves(self, tensor: torch.Tensor) -> None:
        """Record that the block saves ``tensor`` for backward."""
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return
        address = tensor.untyped_storage()._cdata
        if all(address != each.untyped_storage()._cdata for each in self.module.parameters()):
            self._saved.append((tuple(self._path), self._storages(tensor)))

    def options(self) -> tuple[Option, ...]:
        """The options of the block, WHOLE first."""
        kinds = {kind for part in self._parts for kind, _ in part.path}
        whole = self._option((WHOLE,), self.hidden)
        # Moments were measured with this option, so their peaks include these bytes.
        found = [replace(whole, backward_bytes=0)]
        for attention, mlp, norm in itertools.product(((), (ATTENTION,)), ((), (ACTIVATION,), (MLP,)), ((), (NORM,))):
            parts = (*attention, *mlp, *norm)
            if kinds.issuperset(parts):
                found.append(self._option(parts, self.kept(parts)))
        return tuple(found)

    def _option(self, parts: tuple[str, ...], kept: Bytes) -> Option:
        saved = set().union(*(storages for _, storages in self._saved))
        rest = sum(size for number, size in kept.items() if number not in self._swappable)
        again = self._stacked if ACTIVATION in parts else set()
        extra = sum(size for number, size in kept.items() if number not in saved or number in again)
        return Option(parts, sum(kept.values()), self._again(parts), rest, extra)

    def _storages(self, values: Any) -> Bytes:
        """The storages of all tensors in ``values``, with bytes rounded up."""
        found = {}
        with torch._C.DisableTorchFunctionSubclass():
            for each in tree_leaves(values):
                if isinstance(each, torch.Tensor):
                    storage = each.untyped_storage()
                    number = _NUMBER.get(storage)
                    if number is None:
                        number = next(_numbers)
                        _NUMBER.set(storage, number)
                    found[number] = -(-(storage.nbytes() + PADDING) // ROUNDING) * ROUNDING
                    if can_be_swapped(each, each.device.type, ()):
                        self._swappable.add(number)
        return found

    def modules(self, part: str) -> list[str]:
        """The modules of the block that are parts of the kind ``part``."""
        return list(dict.fromkeys(name for each in self._parts for kind, name in each.path[-1:] if kind == part))

    def kept(self, parts: Collection[str]) -> Bytes:
        """The storages that the block keeps where ``parts`` are computed again."""
        kept = {
            number: size for path, saved in self._saved if not _is_in(path, parts) for number, size in saved.items()
        }
        calls = [each for each in self._parts if each.path[-1][0] in parts and not _is_in(each.path[:-1], parts)]
        for call in calls:
            kept |= call.given
        for number in itertools.chain(*(each.returned for each in calls if each.path[-1][0] in (NORM, ACTIVATION))):
            kept.pop(number, None)
        return {number: size for number, size in kept.items() if number not in self._there}

    def _again(self, parts: Collection[str]) -> float:
        """Seconds that computing ``parts`` again takes, up to the last tensor that is saved."""
        if WHOLE in parts:
            return sum(seconds for _, seconds, saved in self._seconds if saved < len(self._saved))
        total = 0.0
        last: dict[Path, int] = {}
        for index, (path, _) in enumerate(self._saved):
            last[_outermost(path, parts)] = index
        for path, seconds, saved in self._seconds:
            around = _outermost(path, parts)
            if around and (around[-1][0] in (NORM, ACTIVATION) or saved <= last.get(around, -1)):
                total += seconds
        return total

    def _computed(self, seconds: float) -> None:
        if seconds:
            self._seconds.append((tuple(self._path), seconds, len(self._saved)))

    def _follow(self, stack: ExitStack) -> None:
        """Follow the calls of the parts of the block, until ``stack`` is closed."""
        plan = self._plan
        for name in plan.inside(self.name, Role.NORM, Role.HEAD_NORM):
            self._follow_part(stack, NORM, name)
        for name in plan.inside(self.name, *SUBLAYERS):
            if plan.around(name, *SUBLAYERS) is None:
                self._follow_part(stack, MLP if plan.of(name) in (Role.MLP, Role.MOE) else ATTENTION, name)
        for name in plan.inside(self.name, Role.MLP):
            linears = mlp_linears(plan, name)
            if linears is not None:
                self._follow_activation(stack, name, *linears)

    def _follow_part(self, stack: ExitStack, kind: str, name: str) -> None:
        module = self._model.get_submodule(name)

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._path.append((kind, name))
            self._parts.append(_Part(tuple(self._path), self._storages((args, kwargs))))

        def leave(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            index = self._path.index((kind, name))
            path = tuple(self._path[: index + 1])
            next(each for each in reversed(self._parts) if each.path == path).returned = self._storages(out)
            del self._path[index:]

        _hook(stack, module, enter, leave)

    def _follow_activation(self, stack: ExitStack, name: str, columns: Sequence[str], down: str) -> None:
        """Follow the MLP ``name``: what it computes outside of its linears is the part ACTIVATION."""
        mlp = self._model.get_submodule(name)
        own = (ACTIVATION, name)
        calls: list[_Part] = []

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._path.append(own)
            calls.append(_Part(tuple(self._path), self._storages((args, kwargs))))
            self._parts.append(calls[-1])

        def leave(*_: Any) -> None:
            if own in self._path:
                self._path.remove(own)

        def pause(*_: Any) -> None:
            self._path.remove(own)

        def resume(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            self._path.append(own)
            calls[-1].given |= self._storages(out)

        def end(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._path.remove(own)
            calls[-1].returned = self._storages(args[0] if args else kwargs)

        def stacked(function: Any, *args: Any) -> Any:
            self._path.remove(own)
            out = function(*args)
            self._stacked |= self._storages(out).keys()
            resume(mlp, None, None, out)
            return out

        _hook(stack, mlp, enter, leave)
        for each in columns:
            _hook(stack, mlp.get_submodule(each), pause, resume)
        stack.callback(mlp.get_submodule(down).register_forward_pre_hook(end, with_kwargs=True).remove)
        first = mlp.get_submodule(columns[0])
        if isinstance(first, ColumnLinear) and len(columns) > 1:
            # Their outputs are computed into one tensor, without their forwards.
            set_attribute(first.projections, "stacked", partial(stacked, first.projections.stacked))
            stack.callback(remove_attributes, first.projections, "stacked".__eq__)


def _hook(stack: ExitStack, module: nn.Module, enter: Hook, leave: Hook) -> None:
    stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(leave, with_kwargs=True).remove)


def _is_in(path: Path, parts: Collection[str]) -> bool:
    return any(kind in parts for kind, _ in path)


def _outermost(path: Path, parts: Collection[str]) -> Path:
    """``path`` up to the first of ``parts`` in it; empty where none is."""
    return next((path[: index + 1] for index, (kind, _) in enumerate(path) if kind in parts), ())
