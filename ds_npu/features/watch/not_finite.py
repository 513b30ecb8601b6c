"""Ends a run at the first loss or gradient that is not finite, and names its step, rank and layer.

Where DeepSpeed reads whether the gradients are finite, it is asked (``zero_ext/skipped_steps.py``): the host waits for
the device no more often, the weights are those of the step before, and the micro-batch runs forward once more to find
the module. Where DeepSpeed reads nothing (float32 without ZeRO, bf16 with ``check_grad_overflow`` false), the norm, or
without one the losses, are read a step later, when they are there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_npu.log import logger
from ds_npu.parallel.tensor.shard_access import allow_shard_access
from ds_npu.zero_ext.method_wraps import MethodLevel
from ds_npu.zero_ext.skipped_steps import DelayedReading, before_a_skip, reduced_gradients
from ds_npu.zero_ext.training_engine import TrainingEngine

KEPT_BYTES = 2**24
"""The most bytes of a micro-batch whose arguments are kept to find the module, until its step ends."""
SHOWN = 4


@dataclass
class Finding:
    """The findings of one rank in a step, which are sent to all others."""

    rank: int
    losses: list[tuple[int, float]]
    """Micro-batches whose loss is not finite, and the loss."""
    parameters: int
    """The number of parameters with a gradient, or value, that is not finite."""
    last: tuple[int, int, str] | None
    """The last such parameter in the model, the first in backward: its stage, its number there, its name."""
    kept: list[int]
    """Micro-batches that can run again."""
    module: tuple[int, str] | None = None
    """The first executed module whose output is not finite: its number in the order of execution, its name."""


@dataclass
class Steps:
    """Arguments and losses of the micro-batches of one optimizer step."""

    engine: TrainingEngine
    is_pipeline: bool = False
    """Whether the engine runs a schedule of DeepSpeed's, by which no micro-batch can run again alone."""
    arguments: list[tuple[Any, Any] | None] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    delayed: DelayedReading | None = None
    """The norm, or the sum of the losses, of the step that has ended."""
    delayed_losses: list[torch.Tensor] = field(default_factory=list)
    """The losses of that step."""
    is_everyones: bool = False
    """Whether the delayed reading is the same on all ranks."""

    def keep(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Keep the arguments of a forward that trains."""
        if module.training and torch.is_grad_enabled():
            self.arguments.append(None if self.is_pipeline or not _can_be_kept((args, kwargs)) else (args, kwargs))

    def clear(self) -> None:
        self.arguments.clear()
        self.losses.clear()

    def forget(self) -> None:
        """Forget also the step that has ended: its weights no longer exist."""
        self.clear()
        self.delayed, self.delayed_losses = None, []

    def all_losses(self) -> list[torch.Tensor]:
        """The losses of the step's micro-batches; in a pipeline, only the last stage has them."""
        if not self.is_pipeline:
            return [*self.losses]
        return [torch.stack([leaf.float() for leaf in tree_leaves(each)]).sum() for each in self.engine.fwd_outputs]

    def read_delayed(self) -> None:
        """Start copying the norm of the step that has ended, or its losses, to the host; check a CPU's at once."""
        norm, self.delayed_losses = self.engine.get_global_grad_norm(), self.all_losses()
        self.is_everyones = norm is not None
        if norm is None and self.delayed_losses:
            norm = torch.stack([loss.float() for loss in self.delayed_losses]).sum()
        self.delayed = DelayedReading(torch.as_tensor(norm)) if norm is not None else None
        if self.delayed is not None and self.delayed.is_there:
            self.check_delayed(self.engine.global_steps)

    def check_delayed(self, step: int) -> None:
        """Stop where the delayed reading of ``step`` is not finite, or is DeepSpeed's -1 for that."""
        reading, self.delayed = self.delayed, None
        if reading is None:
            return
        value = reading.value()
        if not math.isfinite(value) or (self.is_everyones and value < 0):
            self.stop(step, is_updated=True)

    def stop(self, step: int, *, is_updated: bool = False) -> NoReturn:
        """Raise FloatingPointError with the findings of all ranks, which all call it, or of one rank alone."""
        alone = is_updated and not self.is_everyones
        mine = self._finding(is_updated)
        found = [mine] if alone else _gathered(mine)
        again = None if is_updated or not any(each.losses for each in found) else _common(found)
        if again is not None:
            logger().warning("step %d: a loss is not finite; its batch runs again to find the module", step)
            mine.module = self._run_again(again)
            found = _gathered(mine)
        raise FloatingPointError(_message(step, found, is_updated=is_updated))

    def _finding(self, is_updated: bool) -> Finding:
        losses = [
            (index, loss.item())
            for index, loss in enumerate(self.delayed_losses if is_updated else self.all_losses())
            if not loss.isfinite().all()
        ]
        kept = [index for index, each in enumerate(self.arguments) if each is not None]
        if len(self.arguments) != len(self.losses):
            kept = []  # It is not known which loss belongs to which forward.
        with allow_shard_access():
            wrong = {id(parameter) for parameter, tensor in self._tensors(is_updated) if not tensor.isfinite().all()}
        names = [name for name, _ in self.engine.module.named_parameters()]
        numbers = [number for number, each in enumerate(self.engine.module.parameters()) if id(each) in wrong]
        last = (self.engine.topology.rank("pp"), numbers[-1], names[numbers[-1]]) if numbers else None
        return Finding(dist.get_rank(), losses, len(numbers), last, kept)

    def _tensors(self, is_updated: bool) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        if not is_updated:
            return reduced_gradients(self.engine.optimizer)
        return ((parameter, parameter.detach()) for parameter in self.engine.module.parameters())

    def _run_again(self, index: int) -> tuple[int, str] | None:
        kept = self.arguments[index]
        assert kept is not None
        args, kwargs = kept
        found: list[tuple[int, str]] = []
        executed = count()

        def look(name: str) -> Any:
            def hook(module: nn.Module, _args: Any, output: Any) -> None:
                order = next(executed)
                floats = (leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf) and leaf.is_floating_point())
                if not found and any(not leaf.isfinite().all() for leaf in floats):
                    found.append((order, f"{name or 'the model'} ({type(module).__name__})"))

            return hook

        handles = [module.register_forward_hook(look(name)) for name, module in self.engine.module.named_modules()]
        try:
            with torch.no_grad():
                self.engine(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return found[0] if found else None


def stop_at_not_finite(engine: TrainingEngine, *, is_pipeline: bool) -> None:
    """Make ``engine``, a DeepSpeed engine, raise FloatingPointError in the step that is not finite."""
    steps = Steps(engine, is_pipeline)
    is_asked = before_a_skip(engine.optimizer, lambda: steps.stop(engine.global_steps + 1))
    reads_delayed = not is_asked and engine.torch_autocast_z0_gradscaler is None

    def after_step() -> None:
        if reads_delayed:
            steps.read_delayed()
        steps.clear()

    engine.module.register_forward_pre_hook(steps.keep, with_kwargs=True)
    events = engine.events
    events.before_backward(MethodLevel.FINITE, lambda loss: steps.losses.append(loss.detach()))
    events.before_step(MethodLevel.FINITE, lambda: steps.check_delayed(engine.global_steps))
    events.after_step(MethodLevel.FINITE, after_step)
    events.after_load(MethodLevel.FINITE, steps.forget)


def _can_be_kept(arguments: Any) -> bool:
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    return not any(each.requires_grad for each in tensors) and sum(each.nbytes for each in tensors) <= KEPT_BYTES


def _gathered(mine: Finding) -> list[Finding]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _common(found: list[Finding]) -> int | None:
    """The first micro-batch with a loss that is not finite on some rank, if every rank can run it again."""
    wrong = {index for each in found for index, _ in each.losses}
    return min(wrong.intersection(*(each.kept for each in found)), default=None)


def _message(step: int, found: list[Finding], *, is_updated: bool) -> str:
    lossy = [each for each in found if each.losses]
    lines = [f"step {step}: the {'loss' if lossy else 'gradient norm'} is not finite"]
    for each in lossy[:SHOWN]:
        listed = ", ".join(f"{value} in micro-batch {index}" for index, value in each.losses[:SHOWN])
        lines.append(f"rank {each.rank}: loss {listed}")
    if len(lossy) > SHOWN:
        lines.append(f"and the loss of {len(lossy) - SHOWN} more ranks")
    modules = [(*each.module, each.rank) for each in found if each.module is not None]
    if modules:
        _, name, rank = min(modules)
        lines.append(f"first module whose output is not finite: {name}, on rank {rank}")
    named = [(*each.last, each) for each in found if each.last is not None]
    if named and not modules:
        what = "parameter" if is_updated else "gradient"
        _, _, name, each = max(named, key=lambda item: item[:2])
        lines.append(
            f"first {what} in the order of backward that is not finite: {name}, on rank {each.rank}, where "
            f"{each.parameters} are not"
        )
    if is_updated:
        lines.append("the weights were updated by it: DeepSpeed does not look first with this optimizer and config")
    else:
        lines.append(f"the weights are those of step {step - 1}")
    lines.append(
        "What to do: look at this batch and this layer; a smaller learning rate, or gradient_clipping; "
        "ds_npu.watch.finite false goes on as DeepSpeed does"
    )
    return "\n  ".join(lines)
