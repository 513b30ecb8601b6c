"""Ends a run at the first loss or gradient that is not finite, and names its step, rank and layer.

Where DeepSpeed reads whether the gradients are finite, its reading is used (``zero_ext/skipped_steps.py``): the host
waits for the device no more often, the weights are those of the step before, and the micro-batch runs again to find the
first wrong module (``micro_batch_again.py``). Where DeepSpeed reads nothing (float32 without ZeRO, bf16 with
``check_grad_overflow`` false), the norm, or without one the losses, are read a step later, when they are there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_npu.features.watch.micro_batch_again import KEPT_BYTES, KeptForward, MicroBatchAgain, WrongModule
from ds_npu.log import logger
from ds_npu.parallel.tensor.shard_access import allow_shard_access
from ds_npu.zero_ext.method_wraps import MethodLevel
from ds_npu.zero_ext.skipped_steps import DelayedReading, before_a_skip, reduced_gradients
from ds_npu.zero_ext.training_engine import TrainingEngine

SHOWN = 4
AGAIN_FINITE = (
    "when the micro-batches run again no module makes it. It came up outside of them (in the script's own loss, in "
    "sums over micro-batches or ranks, in the norm), or in kernels that do not repeat or are compiled"
)
NOT_ALONE = "no micro-batch runs again alone in a PipelineModule's schedule, nor under DeepCompile"
NOT_KEPT = (
    f"some rank has not kept the arguments of the micro-batch: they are larger than {KEPT_BYTES // 2**20} MiB, belong "
    "to a graph, or came by engine.train_batch; or its forwards and losses are not one to one"
)
NOT_KEPT_BACKWARD = (
    f"{NOT_KEPT}; or its loss is made of several outputs of the model, or of one larger than {KEPT_BYTES // 2**20} MiB"
)


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
    """Micro-batches whose forward can run again."""
    kept_backward: list[int]
    """Micro-batches whose backward can run again, too."""


@dataclass
class Steps:
    """Arguments and losses of the micro-batches of one optimizer step."""

    engine: TrainingEngine
    again: MicroBatchAgain
    is_pipeline: bool = False
    """Whether the engine runs a schedule of DeepSpeed's, by which no micro-batch can run again alone."""
    forwards: list[KeptForward | None] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    delayed: DelayedReading | None = None
    """The norm, or the sum of the losses, of the step that has ended."""
    delayed_losses: list[torch.Tensor] = field(default_factory=list)
    """The losses of that step."""
    is_everyones: bool = False
    """Whether the delayed reading is the same on all ranks."""

    def forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a ``forward`` of the engine; keep its arguments if it trains."""
        if self.again.is_running or not self.engine.module.training or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        kept = self.again.kept(args, kwargs)
        output = forward(*args, **kwargs)
        self.forwards.append(kept)
        if kept is not None:
            kept.watch_output(output)
        return output

    def clear(self) -> None:
        self.forwards.clear()
        self.losses.clear()

    def forget(self) -> None:
        """After a load, forget also the step that has ended: its weights no longer exist."""
        self.clear()
        self.delayed, self.delayed_losses = None, []

    def all_losses(self) -> list[torch.Tensor]:
        """The losses of the step's micro-batches; in a pipeline, only the last stage has them."""
        if not self.is_pipeline:
            return [*self.losses]
        return [torch.stack([leaf.float() for leaf in tree_leaves(each)]).sum() for each in self.engine.fwd_outputs]

    def read_delayed(self) -> None:
        """Start copying the norm of the step that has ended, or its losses, to the host; check a CPU's at once."""
        norm = self.engine.get_global_grad_norm()
        self.delayed_losses = self.all_losses()
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
        module, why = (None, "") if is_updated else self._first_wrong(step, found)
        raise FloatingPointError(_message(step, found, module, why, is_updated=is_updated))

    def _first_wrong(self, step: int, found: list[Finding]) -> tuple[WrongModule | None, str]:
        """The first wrong module of all ranks, or why none is named."""
        if self.is_pipeline or self.engine.is_deepcompile_enabled():
            return None, NOT_ALONE
        backward = not any(each.losses for each in found)
        which = _common([each.kept_backward for each in found])
        if not backward:
            wrong = {index for each in found for index, _ in each.losses}
            which = sorted(wrong.intersection(_common([each.kept for each in found])))[:1]
        if not which:
            return None, NOT_KEPT_BACKWARD if backward else NOT_KEPT
        what = "gradients are" if backward else "a loss is"
        logger().warning("step %d: %s not finite; the batch runs again to find the module", step, what)
        for index in which:
            kept = self.forwards[index]
            assert kept is not None
            module = self.again.find(index, kept, step, backward=backward)
            if module is not None:
                return module, ""
        return None, AGAIN_FINITE

    def _finding(self, is_updated: bool) -> Finding:
        losses = [
            (index, loss.item())
            for index, loss in enumerate(self.delayed_losses if is_updated else self.all_losses())
            if not loss.isfinite().all()
        ]
        kept = [index for index, each in enumerate(self.forwards) if each is not None]
        if len(self.forwards) != len(self.losses):
            kept = []  # It is not known which loss belongs to which forward.
        backwards = [index for index in kept if self.again.has_backward(self.forwards[index])]
        with allow_shard_access():
            wrong = {id(parameter) for parameter, tensor in self._tensors(is_updated) if not tensor.isfinite().all()}
        names = [name for name, _ in self.engine.module.named_parameters()]
        numbers = [number for number, each in enumerate(self.engine.module.parameters()) if id(each) in wrong]
        last = (self.engine.topology.rank("pp"), numbers[-1], names[numbers[-1]]) if numbers else None
        return Finding(dist.get_rank(), losses, len(numbers), last, kept, backwards)

    def _tensors(self, is_updated: bool) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        if not is_updated:
            return reduced_gradients(self.engine.optimizer)
        return ((parameter, parameter.detach()) for parameter in self.engine.module.parameters())


def stop_at_not_finite(engine: TrainingEngine, *, folder: str, is_pipeline: bool) -> None:
    """Make ``engine``, a DeepSpeed engine, raise FloatingPointError in the step that is not finite.

    ``folder``: where the first wrong module is written.
    """
    steps = Steps(engine, MicroBatchAgain(engine, folder), is_pipeline)
    is_asked = before_a_skip(engine.optimizer, lambda: steps.stop(engine.global_steps + 1))
    reads_delayed = not is_asked and engine.torch_autocast_z0_gradscaler is None

    def after_step() -> None:
        if reads_delayed:
            steps.read_delayed()
        steps.clear()

    events = engine.events
    if not is_pipeline:
        events.around_forward(MethodLevel.FINITE, steps.forward)
    events.before_backward(MethodLevel.FINITE, lambda loss: steps.losses.append(loss.detach()))
    events.before_step(MethodLevel.FINITE, lambda: steps.check_delayed(engine.global_steps))
    events.after_step(MethodLevel.FINITE, after_step)
    events.after_load(MethodLevel.FINITE, steps.forget)


def _gathered(mine: Finding) -> list[Finding]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _common(kept: list[list[int]]) -> list[int]:
    """The micro-batches that every rank can run again."""
    return sorted(set(kept[0]).intersection(*kept))


def _message(step: int, found: list[Finding], module: WrongModule | None, why: str, *, is_updated: bool) -> str:
    lossy = [each for each in found if each.losses]
    lines = [f"step {step}: the {'loss' if lossy else 'gradient norm'} is not finite"]
    for each in lossy[:SHOWN]:
        listed = ", ".join(f"{value} in micro-batch {index}" for index, value in each.losses[:SHOWN])
        lines.append(f"rank {each.rank}: loss {listed}")
    if len(lossy) > SHOWN:
        lines.append(f"and the loss of {len(lossy) - SHOWN} more ranks")
    named = [(*each.last, each) for each in found if each.last is not None]
    if named and not (lossy and module):
        what = "parameter" if is_updated else "gradient"
        _, _, name, each = max(named, key=lambda item: item[:2])
        lines.append(
            f"first {what} in the order of backward that is not finite: {name}, on rank {each.rank}, where "
            f"{each.parameters} are not"
        )
    if module is not None:
        lines += module.lines()
    elif why:
        lines.append(f"no module is named: {why}")
    if is_updated:
        lines.append("the weights were updated by it: DeepSpeed does not look first with this optimizer and config")
    else:
        lines.append(f"the weights are those of step {step - 1}")
    lines.append(
        "What to do: look at this batch and this layer; a smaller learning rate, or gradient_clipping; "
        "ds_npu.watch.finite false goes on as DeepSpeed does"
    )
    return "\n  ".join(lines)
