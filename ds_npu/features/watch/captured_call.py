"""One call of one module, captured while a micro-batch runs again: tensors in and out, weights, random state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_npu.features.recorded_calls.plain_data import Plain, as_plain, host_copy, module_data, unknown_in
from ds_npu.features.recorded_calls.tensor_statistics import (
    TensorStatistics,
    named_leaves,
    statistics_in,
    statistics_of,
)
from ds_npu.features.watch.wrong_operators import WrongOperator
from ds_npu.models.attributes import copy_attributes
from ds_npu.parallel.runtime.calls import Arguments, Keywords
from ds_npu.parallel.tensor.randomness import generator_states

MOST_BYTES = 2**30
"""The most bytes of weights, or of arguments, that are written."""

Figures = dict[str, TensorStatistics]


class _Border(torch.autograd.Function):
    """Copies tensors at the border of one module, so that gradients of arguments are those of this module alone, and
    those of outputs come from outside of it."""

    @staticmethod
    def forward(ctx: Any, note: Callable[[str, torch.Tensor], None], names: list[str], *tensors: torch.Tensor) -> Any:
        ctx.note, ctx.names = note, names
        return tuple(each.clone() for each in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        for name, gradient in zip(ctx.names, gradients, strict=True):
            if gradient is not None:
                ctx.note(name, gradient)
        return (None, None, *gradients)


@dataclass
class CapturedCall:
    """The captured call of the module in which ``wrong`` was found."""

    wrong: WrongOperator
    device_type: str
    came: Figures = field(default_factory=dict)
    """Figures of the arguments; in backward of the outputs' gradients."""
    went: Figures = field(default_factory=dict)
    """Figures of the outputs; in backward of the gradients of arguments and weights."""
    weights_used: Figures = field(default_factory=dict)
    data: dict[str, Plain] = field(default_factory=dict)
    """The file's content."""
    left_out: list[str] = field(default_factory=list)
    """Names of things that the file does not hold, with the reason."""
    _calls: int = 0
    _is_running: bool = False
    _weights: dict[str, torch.Tensor] = field(default_factory=dict)
    _gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gradients of the outputs."""
    _given: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gradients of arguments and weights."""

    @contextmanager
    def capturing(self, model: nn.Module) -> Iterator[None]:
        """Capture the call while the micro-batch runs in this context."""
        module = model.get_submodule(self.wrong.name)
        with ExitStack() as undo:
            for name, part in module.named_modules():
                before = part.register_forward_pre_hook(partial(self._keep_weights, name))
                undo.callback(before.remove)
            # In this order: the module's own weights are kept once it runs.
            undo.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(self._leave, prepend=True).remove)
            if self.wrong.is_backward:
                for name, weight in module.named_parameters():
                    if weight.requires_grad:
                        hooked: Any = weight
                        undo.callback(hooked.register_hook(partial(self._note_gradient, f"weight {name}")).remove)
            yield

    def finish(self, operator: Plain) -> None:
        """Put the file's content together once the run has ended."""
        self.data["operator"] = operator
        size = sum(each.nbytes for each in self._weights.values())
        if size > MOST_BYTES:
            self.left_out.append(f"weights of {size / 2**30:.1f} GiB, more than {MOST_BYTES / 2**30:.0f}")
            self._weights = {}
        self.data["weights"] = self._weights
        self.data["gradients"], self.data["given_gradients"] = self._gradients, self._given

    def _keep_weights(self, name: str, module: nn.Module, *_: object) -> None:
        if not (self._is_running or (name == "" and self._calls == self.wrong.call)):
            return
        prefix = f"{name}." if name else ""
        for each, weight in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if prefix + each not in self._weights and self._may_grow:
                self._weights[prefix + each] = host_copy(weight)
            if weight.is_floating_point() and (name == "" or len(self.weights_used) < 4):
                self.weights_used[prefix + each] = statistics_of(weight)

    @property
    def _may_grow(self) -> bool:
        return sum(each.nbytes for each in [*self._weights.values(), *self._given.values()]) <= MOST_BYTES

    def _enter(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> Any:
        self._calls += 1
        if self._calls - 1 != self.wrong.call:
            return None
        self._is_running = True
        given = {"args": args, "kwargs": kwargs}
        if not self.wrong.is_backward:
            self.came = statistics_in(kwargs) | statistics_in(args, "args")
        size = sum(each.nbytes for _, each in named_leaves(given))
        if size > MOST_BYTES:
            # Without them the file holds the operator alone.
            self.left_out.append(f"arguments of {size / 2**30:.1f} GiB, more than {MOST_BYTES / 2**30:.0f}")
        else:
            self._describe(module, given)
        if not self.wrong.is_backward:
            return None
        return _bordered((args, kwargs), dict(named_leaves({**kwargs, "args": args})), self._note_gradient)

    def _describe(self, module: nn.Module, given: Keywords) -> None:
        autocast = torch.is_autocast_enabled(self.device_type)
        self.data |= {
            "module": module_data(module),
            "arguments": as_plain(given),
            "needs_gradients": [path for path, each in named_leaves(given) if each.requires_grad],
            "random": as_plain(generator_states(self.device_type)),
            "autocast": torch.get_autocast_dtype(self.device_type) if autocast else None,
        }
        self.left_out += unknown_in(self.data["arguments"])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._is_running:
            return None
        self._is_running = False
        self.data["output"] = as_plain(output)
        if not self.wrong.is_backward:
            self.went = statistics_in(output, "output")
            return None
        return _bordered(output, dict(named_leaves(output, "output")), self._note_output_gradient)

    def _note_output_gradient(self, path: str, gradient: torch.Tensor) -> None:
        self._gradients[path] = host_copy(gradient)
        self.came[f"gradient of {path}"] = statistics_of(gradient)

    def _note_gradient(self, of: str, gradient: torch.Tensor) -> None:
        self.went[f"gradient of {of}"] = statistics_of(gradient)
        if self._may_grow:
            self._given[f"gradient of {of}"] = host_copy(gradient)


def _bordered(tree: Any, named: Mapping[str, torch.Tensor], note: Callable[[str, torch.Tensor], None]) -> Any:
    """``tree`` with copies of those of its tensors that have a graph.

    ``note`` is called with the copies' gradients. None where no tensor has a graph.
    """
    leaves, spec = tree_flatten(tree)
    names = {id(each): name for name, each in named.items() if each.requires_grad}
    chosen = [index for index, each in enumerate(leaves) if id(each) in names]
    if not chosen:
        return None
    tensors = [leaves[index] for index in chosen]
    copies = _Border.apply(note, [names[id(each)] for each in tensors], *tensors)  # type: ignore[no-untyped-call]
    for index, copy in zip(chosen, copies, strict=True):
        copy_attributes(leaves[index], copy)
        leaves[index] = copy
    return tree_unflatten(leaves, spec)
