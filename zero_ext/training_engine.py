"""DeepSpeed's training engine as features see it, and the events of it that they subscribe to."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ds_npu.parallel.runtime.forward_wraps import Forward, Wrapper
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.method_wraps import MethodLevel, wrap_method
from ds_npu.zero_ext.step_flop import StepFlop

STEP, BACKWARD = "_take_model_step", "backward"
CALLS = ("forward", BACKWARD, "train_batch", STEP)
"""Methods of an engine in which a training step computes; code of the script runs between them."""
Action = Callable[[], object]
Context = Callable[[], AbstractContextManager[object]]
Undo = Callable[[], None]


class Monitor(Protocol):
    """DeepSpeed's monitor."""

    enabled: bool

    def write_events(self, event_list: Sequence[tuple[str, float, int]]) -> None: ...


class Whereabouts(Protocol):
    """The joint calls of this process's ranks."""

    def say_where(self) -> None:
        """Tell ranks that wait for this one in a call where it stands."""


class TrainingEngine(Protocol):
    """A built engine, DeepSpeed's in one of ds_npu's subclasses."""

    module: nn.Module
    optimizer: Any
    """DeepSpeed's wrapper, or the torch optimizer itself; None without one."""
    basic_optimizer: Any
    """The torch optimizer inside of it; None without one."""
    topology: Topology
    monitor: Monitor
    events: EngineEvents
    joint_calls: Whereabouts
    device: torch.device
    global_steps: int
    """Optimizer steps, those that were skipped too."""
    micro_steps: int
    global_samples: int
    skipped_steps: int
    step_flop: StepFlop | None
    """The counted FLOP of a step, with ``watch.mfu``; None before."""
    torch_autocast_z0_gradscaler: object
    """The scaler of torch's autocast without ZeRO; None without one."""
    fwd_outputs: Sequence[Any]
    """The outputs of a PipelineEngine's last stage, by micro-batch; other engines have none."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def train_micro_batch_size_per_gpu(self) -> int: ...
    def gradient_accumulation_steps(self) -> int: ...
    def steps_per_print(self) -> int | None: ...
    def was_step_applied(self) -> bool: ...
    def get_global_grad_norm(self) -> Any: ...
    def zero_optimization_stage(self) -> int: ...
    def zero_contiguous_gradients(self) -> bool: ...
    def is_deepcompile_enabled(self) -> bool: ...
    def communicator_bytes(self) -> int: ...
    def save_behind_training(self) -> None:
        """Write checkpoints on a thread from now on."""

    def copy_to_peers(self, folder: Path, steps: int) -> str:
        """Keep copies of this rank's files of a checkpoint in memory, and in a peer's, from now on."""

    def factor_of_gradients(self) -> float | None:
        """The factor from gradients as the last forward's graph computes them to those that are accumulated.

        None while it is not known: in stages the gradients of a batch are there before its loss is used.
        """


class EngineEvents:
    """The events of one engine. A subscriber's level, not the time at which it subscribes, says when it is called.

    Before a call subscribers are called from the outermost level to the innermost, behind it the other way round, and
    behind a call that raises not at all.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def before_step(self, level: MethodLevel, function: Action) -> None:
        """Call ``function`` before each optimizer step, at an accumulation boundary, when gradients are reduced."""
        wrap_method(self._engine, STEP, partial(_with_before, function), level)

    def after_step(self, level: MethodLevel, function: Action) -> Undo:
        """Call ``function`` after each optimizer step, one that DeepSpeed has skipped too.

        Returns a function that ends this.
        """
        return wrap_method(self._engine, STEP, partial(_with_after, function), level)

    def before_backward(self, level: MethodLevel, function: Callable[[torch.Tensor], object]) -> None:
        """Call ``function`` with the loss of each micro-batch before its backward."""
        wrap_method(self._engine, BACKWARD, partial(_with_loss, function), level)

    def around_forward(self, level: MethodLevel, wrapper: Wrapper) -> None:
        """Call ``wrapper(forward, *args, **kwargs)`` in place of the engine's forward."""
        wrap_method(self._engine, "forward", wrapper, level)

    def after_load(self, level: MethodLevel, function: Action) -> None:
        """Call ``function`` when a checkpoint has been loaded."""
        wrap_method(self._engine, "load_checkpoint", partial(_with_after, function), level)

    def after_destroy(self, level: MethodLevel, function: Action) -> Undo:
        """Call ``function`` when the engine has been destroyed, by the script or by Python where nothing refers to it.

        Returns a function that ends this.
        """
        return wrap_method(self._engine, "destroy", partial(_with_after, function), level)

    def at_end(self, level: MethodLevel, function: Action) -> None:
        """Call ``function`` once: when the script has destroyed the engine, or else when the process ends."""

        def end() -> None:
            undo()
            atexit.unregister(end)
            function()

        atexit.register(end)
        undo = self.after_destroy(level, end)

    def around_calls(self, level: MethodLevel, context: Context) -> list[Undo]:
        """Run each of the engine's CALLS within a context of its own; returns functions that end this."""
        run = partial(_within, context)
        return [wrap_method(self._engine, name, run, level) for name in CALLS if hasattr(self._engine, name)]

    def around_step(self, level: MethodLevel, context: Context) -> None:
        """Run each optimizer step within a context."""
        wrap_method(self._engine, STEP, partial(_within, context), level)


def _with_before(function: Action, call: Forward, *args: Any, **kwargs: Any) -> Any:
    function()
    return call(*args, **kwargs)


def _with_after(function: Action, call: Forward, *args: Any, **kwargs: Any) -> Any:
    out = call(*args, **kwargs)
    function()
    return out


def _with_loss(
    function: Callable[[torch.Tensor], object], call: Forward, loss: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    function(loss)
    return call(loss, *args, **kwargs)


def _within(context: Context, call: Forward, *args: Any, **kwargs: Any) -> Any:
    with context():
        return call(*args, **kwargs)
