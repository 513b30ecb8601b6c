"""Norms and activation functions whose outputs are not kept, in blocks that keep everything else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_npu.config.roles import Role
from ds_npu.features.recompute.recomputed_calls import is_recomputed, recomputation_of
from ds_npu.memory.held_tensor import HeldTensor
from ds_npu.memory.recomputation import Recomputation, hold_tensor, without_outputs
from ds_npu.models.attributes import set_attribute
from ds_npu.models.plan import ModelPlan
from ds_npu.models.zero3 import is_in_use, is_partitioned
from ds_npu.parallel.runtime.forward_wraps import Forward, Level, P, R, wrap_forward
from ds_npu.parallel.runtime.micro_batch import Fact, is_in_backward, new_forward, running, within
from ds_npu.parallel.tensor.linear import ColumnLinear

COLUMNS = (Role.GATE, Role.UP, Role.GATE_UP, Role.COLUMN)
LAST = (Role.DOWN, Role.ROW)


def mlp_linears(plan: ModelPlan, mlp: str) -> tuple[list[str], str] | None:
    """The children of ``mlp`` that are its first linears, and the last one; None where they are not known."""
    columns = children(plan, mlp, *COLUMNS)
    downs = children(plan, mlp, *LAST)
    return (columns, downs[0]) if columns and len(downs) == 1 else None


def children(plan: ModelPlan, mlp: str, *roles: Role) -> list[str]:
    """The children of ``mlp`` in which modules of ``roles`` are."""
    inside = (name[len(mlp) :].lstrip(".").split(".")[0] for name in plan.inside(mlp, *roles))
    return list(dict.fromkeys(inside))


def without_kept_outputs(module: nn.Module, forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Wrap a block's forward: outputs of Recomputations in it are not kept."""
    if not is_recomputed(module):
        return forward(*args, **kwargs)
    with without_outputs():
        return forward(*args, **kwargs)


class RecomputedNorm:
    """Recomputes a norm; only its arguments are kept."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._is_called_again: Fact[bool] = Fact(while_running=True)

    def __call__(self, norm: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Wrap the forward of ``norm``."""
        if self._is_called_again.of(running()) or not is_recomputed(norm):
            return forward(*args, **kwargs)
        gathers = any(is_partitioned(parameter) for parameter in norm.parameters(recurse=False))
        again = partial(self._gathered, norm, forward) if gathers else forward
        made = recomputation_of(again, self.device_type, whole=True)
        y = made(*args, **kwargs)
        made.forget(y)
        return y

    def _gathered(self, norm: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        # ZeRO-3 gathers a norm's weights for the norm's backward, in which a call of the module would release them. The
        # module that uses the norm's output runs backward before, and then the call gathers them. Weights that were
        # gathered ahead do not count: they differ between micro-batches, and the calls must not (gather_plan).
        if not is_in_backward() or all(map(is_in_use, norm.parameters(recurse=False))):
            return forward(*args, **kwargs)
        with new_forward() as micro_batch:
            self._is_called_again.set(micro_batch, True)
            return norm(*args, **kwargs)


class _InputOfDownError(Exception):
    """Ends the forward of a recomputed MLP."""

    def __init__(self, y: torch.Tensor) -> None:
        super().__init__()
        self.y = y


class _KeptLinear(nn.Module):
    """Replaces a linear in a recomputed MLP: returns the linear's first output."""

    def __init__(self, y: torch.Tensor) -> None:
        super().__init__()
        self.y = y.detach().requires_grad_(y.requires_grad)

    def forward(self, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return self.y


class _EndOfMlp(nn.Module):
    """Replaces the last linear of a recomputed MLP."""

    def forward(self, y: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        raise _InputOfDownError(y)


@dataclass
class _Call:
    """One call of an MLP: the outputs of its linears, by name."""

    made: Recomputation | None = None
    outputs: dict[str, HeldTensor] = field(default_factory=dict)
    rest: ExitStack = field(default_factory=ExitStack)
    """The context that keeps tensors saved from the last linear on."""


class RecomputedActivation:
    """Recomputes whatever an MLP computes between its linears, and keeps the outputs of the first linears.

    ``columns``: the children of ``mlp`` that are its first linears, ``down`` the last one.
    """

    def __init__(self, mlp: nn.Module, columns: list[str], down: str, device_type: str) -> None:
        self.mlp, self.columns, self.down, self.device_type = mlp, columns, down, device_type
        self._call: Fact[_Call | None] = Fact(while_running=True)

    def wrap(self) -> None:
        children = dict(self.mlp.named_children())
        wrap_forward(self.mlp, self._forward, Level.RECOMPUTE)
        for name in self.columns:
            wrap_forward(children[name], partial(self._column, name), Level.RECOMPUTE)
        wrap_forward(children[self.down], self._last, Level.RECOMPUTE)
        first = children[self.columns[0]]
        if isinstance(first, ColumnLinear) and len(self.columns) > 1:
            # Parallel linears whose outputs are computed into one tensor, without their forwards.
            set_attribute(first.projections, "stacked", partial(self._stacked, first.projections.stacked))

    def _forward(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if not is_recomputed(self.mlp):
            return forward(*args, **kwargs)
        call = _Call()
        with within(running()) as micro_batch:
            again = partial(self._again, forward, call)
            call.made = recomputation_of(again, self.device_type, whole=True)
            self._call.set(micro_batch, call)
            try:
                return call.made(*args, **kwargs)
            finally:
                self._call.set(micro_batch, None)
                call.made = None

    def _column(self, name: str, forward: Callable[P, torch.Tensor], *args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        call = self._call.of(running())
        if call is None:
            return forward(*args, **kwargs)
        with without_outputs():
            y = forward(*args, **kwargs)
        call.outputs[name] = hold_tensor(y)
        return y

    def _stacked(self, forward: Forward, *args: Any) -> Any:
        call = self._call.of(running())
        if call is None:
            return forward(*args)
        with without_outputs():
            whole = forward(*args)
        call.outputs.update(zip(self.columns, map(hold_tensor, whole), strict=True))
        return whole

    def _last(self, forward: Forward, y: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        call = self._call.of(running())
        if call is not None and call.made is not None and len(call.outputs) == len(self.columns):
            call.made.forget(y)
            call.rest.enter_context(without_outputs())
        return forward(y, *args, **kwargs)

    def _again(self, forward: Forward, call: _Call, *args: Any, **kwargs: Any) -> Any:
        """Run the MLP.

        In the recomputation, return the input of its last linear, made of the kept outputs of its first linears.
        """
        if len(call.outputs) < len(self.columns):
            with call.rest:
                return forward(*args, **kwargs)
        stand_ins: dict[str, nn.Module] = {name: _KeptLinear(call.outputs[name].get()) for name in self.columns}
        children = self.mlp._modules
        before = dict(children)
        children.update(stand_ins | {self.down: _EndOfMlp()})
        try:
            forward(*args, **kwargs)
        except _InputOfDownError as ended:
            return ended.y
        finally:
            children.update(before)
        raise RuntimeError(f"{type(self.mlp).__name__} did not call {self.down} when it was computed again")
