"""The calls of a model's modules in one forward, and the call that an operator of forward or backward belongs to.

A node of the autograd graph has the number of its making on its thread, so that the nodes that a module has made are
those with numbers from its beginning to its end: an operator of backward belongs to the module whose node runs it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_npu.models.guards import is_compiled
from ds_npu.parallel.pipeline.pass_through import BORDER_STATES
from ds_npu.parallel.runtime.calls import Arguments, Keywords
from ds_npu.parallel.runtime.micro_batch import is_in_backward, running

THE_MODEL = "the model"


@dataclass
class ModuleCall:
    """One call of one module."""

    index: int
    """Its number in the order of execution."""
    name: str
    kind: str
    """The name of the module's class."""
    number: int
    """The number of earlier calls of the same module."""
    caller: ModuleCall | None
    first_node: int
    """The number of the first autograd node that the call makes."""
    is_recomputed: bool
    end_node: int | None = None
    micro_batch: int | None = None
    """The number of the micro-batch in a pipeline; None without stages."""
    output_is_wrong: bool | None = None
    """Whether a value in its output is not finite; None where it returns no float tensors."""

    def __str__(self) -> str:
        return f"{self.name or THE_MODEL} ({self.kind})"

    @property
    def around(self) -> Iterator[ModuleCall]:
        """This call, and those it is within, innermost first."""
        call: ModuleCall | None = self
        while call is not None:
            yield call
            call = call.caller

    def has_made(self, node: int) -> bool:
        return self.first_node <= node and (self.end_node is None or node < self.end_node)


class _Stack(threading.local):
    """The calls that run on one thread."""

    def __init__(self) -> None:
        self.calls: list[ModuleCall] = []


class ModuleCalls:
    """Records the calls of all modules of ``model`` while ``recording``.

    ``entered(call, module, args, kwargs)`` is called before each, ``left(call, module, output)`` behind it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[ModuleCall] = []
        self.entered: Callable[[ModuleCall, nn.Module, Arguments, Keywords], None] | None = None
        self.left: Callable[[ModuleCall, nn.Module, Any], None] | None = None
        self._model = model
        self._stack = _Stack()
        self._counts: Counter[str] = Counter()
        self._stage_calls: Counter[int] = Counter()

    @contextmanager
    def recording(self) -> Iterator[None]:
        handles = []
        for name, module in self._model.named_modules():
            enter, leave = self._hooks(name)
            # Behind the hooks that are there (ZeRO 3 gathers weights in one), and before a later one's.
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, always_call=True, prepend=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def current(self) -> tuple[ModuleCall | None, bool]:
        """The innermost call whose operators run on this thread, and whether they are those of its backward."""
        calls = self._stack.calls
        if calls and calls[-1].is_recomputed == is_in_backward():
            return calls[-1], False
        node: Any = torch._C._current_autograd_node()
        return (None, is_in_backward()) if node is None else (self._maker(int(node._sequence_nr())), True)

    def _micro_batch(self, caller: ModuleCall | None) -> int | None:
        if caller is not None:
            return caller.micro_batch
        border = BORDER_STATES.of(running())
        if border is None:
            return None
        # The forwards of each stage of a schedule are in the order of the micro-batches.
        self._stage_calls[border.stage.index] += 1
        return self._stage_calls[border.stage.index] - 1

    def _maker(self, number: int) -> ModuleCall | None:
        # Later calls are within earlier ones, or behind them.
        return next((call for call in reversed(self.calls) if call.has_made(number)), None)

    def _hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
            caller = self._stack.calls[-1] if self._stack.calls else None
            node = torch._C._autograd._get_sequence_nr()
            number = self._counts[name]
            call = ModuleCall(len(self.calls), name, type(module).__name__, number, caller, node, is_in_backward())
            self._counts[name] += 1
            call.micro_batch = self._micro_batch(caller)
            self.calls.append(call)
            self._stack.calls.append(call)
            if self.entered is not None:
                self.entered(call, module, args, kwargs)

        def leave(module: nn.Module, _args: Any, output: Any) -> None:
            call = self._stack.calls.pop()
            call.end_node = torch._C._autograd._get_sequence_nr()
            if self.left is not None:
                self.left(call, module, output)

        return enter, leave


def has_compiled_modules(model: nn.Module) -> bool:
    """Whether torch.compile has compiled a module of ``model``."""
    return any(map(is_compiled, model.modules()))


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """A context in which the modules of ``model`` that torch.compile has compiled run as they are written."""
    with torch.compiler.set_stance("force_eager") if has_compiled_modules(model) else nullcontext():
        yield
