"""The gradients of one batch, apart from those that were accumulated before, until their factor is known.

A pipeline computes the gradients of a batch before its caller has made anything of the loss: divided it by accumulation
steps, or multiplied it by a number of ranks. An embedding and a head that share one weight and stand on two of its
ranks have copies of it, and sum their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_npu.parallel.pipeline.pass_through import TIED_APART
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.gradient_buffer import GRAD_ACCUM
from ds_npu.zero_ext.gradient_norm import REPLICATED
from ds_npu.zero_ext.training_engine import TrainingEngine


@dataclass(frozen=True)
class Slot:
    """Where the gradient of one weight is accumulated: ``weight.grad``."""

    weight: nn.Parameter

    def value(self) -> torch.Tensor | None:
        """The accumulated gradient; None if there is none."""
        return self.weight.grad

    def take(self) -> torch.Tensor | None:
        """Remove the value, and return it."""
        found = self.value()
        self._set(None)
        return found

    def add(self, taken: torch.Tensor) -> None:
        """Add what was taken to the value."""
        found = self.value()
        self._set(taken if found is None else taken.add_(found))

    def _set(self, gradient: torch.Tensor | None) -> None:
        self.weight.grad = gradient


class _GradAccumSlot(Slot):
    """``weight.grad_accum`` of ZeRO 1 and 2."""

    def value(self) -> torch.Tensor | None:
        return GRAD_ACCUM.get(self.weight)

    def _set(self, gradient: torch.Tensor | None) -> None:
        GRAD_ACCUM.set(self.weight, gradient)


@dataclass(frozen=True)
class _FlatSlot(Slot):
    """A part of the flat float32 gradient of BF16_Optimizer."""

    optimizer: Any
    group: int
    index: int

    def value(self) -> torch.Tensor | None:
        if not self.optimizer.fp32_groups_has_gradients[self.group][self.index]:
            return None
        found: torch.Tensor = self.optimizer.fp32_groups_gradients[self.group][self.index]
        return found.view(self.weight.shape)

    def take(self) -> torch.Tensor | None:
        found = self.value()
        if found is None:
            return None
        copy = found.clone()
        found.zero_()
        self.optimizer.fp32_groups_has_gradients[self.group][self.index] = False
        return copy

    def add(self, taken: torch.Tensor) -> None:
        flat = self.optimizer.fp32_groups_gradients[self.group][self.index]
        flat.view(self.weight.shape).add_(taken)
        self.optimizer.fp32_groups_has_gradients[self.group][self.index] = True


def gradient_slots(engine: TrainingEngine) -> list[Slot]:
    """Where ``engine``, whose reduction is held back, accumulates the gradient of each weight that is trained."""
    return list(_slots(engine.optimizer, [each for each in engine.module.parameters() if each.requires_grad]))


def _slots(optimizer: Any, weights: Sequence[nn.Parameter]) -> Iterator[Slot]:
    if isinstance(optimizer, BF16_Optimizer):
        for group, held in enumerate(optimizer.bf16_groups):
            yield from (_FlatSlot(weight, optimizer, group, index) for index, weight in enumerate(held))
        return
    apart = isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.use_grad_accum_attribute
    for weight in weights:
        yield _GradAccumSlot(weight) if apart and GRAD_ACCUM.is_on(weight) else Slot(weight)


class PendingGradients:
    """The gradients that have come since ``begin``, in the slots, and those from before, set apart."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self._before: list[tuple[Slot, torch.Tensor]] = []
        self.factor: torch.Tensor | None = None
        """The factor of the last batch; None until it is committed."""

    def begin(self) -> None:
        """Begin a batch: set apart all gradients accumulated so far, without a copy but for BF16_Optimizer."""
        self.factor = None
        taken = [(slot, slot.take()) for slot in self.slots]
        self._before = [(slot, value) for slot, value in taken if value is not None]

    @torch.no_grad()
    def commit(self, factor: torch.Tensor) -> None:
        """Multiply the batch's gradients by ``factor``, a scalar on their device, and add what was set apart."""
        self.factor = factor
        for slot in self.slots:
            value = slot.value()
            if value is not None:
                value.mul_(factor)
        self._add_again()

    @torch.no_grad()
    def drop(self) -> None:
        """Drop the batch's gradients, and put back what was set apart."""
        for slot in self.slots:
            slot.take()
        self._add_again()

    def _add_again(self) -> None:
        for slot, taken in self._before:
            slot.add(taken)
        self._before = []


def tied_group(topology: Topology, first: int, last: int) -> dist.ProcessGroup:
    """The group of the pipeline ranks ``first`` and ``last``; of itself alone for another rank. All ranks call it."""
    others = [[rank] for rank in range(topology.size("pp")) if rank not in (first, last)]
    return topology.within("pp", [[first, last], *others], "tied weights")


def equalise_tied(model: nn.Module, topology: Topology, rank_of: Sequence[int]) -> None:
    """Give the head the embedding's values, and let one of both count in norms. All ranks call it."""
    if rank_of[0] == rank_of[-1]:
        return
    group = tied_group(topology, rank_of[0], rank_of[-1])
    for weight in model.parameters():
        if TIED_APART.get(weight):
            # The model is still on the host, and NPUs' groups send nothing from there.
            values = weight.data.to(get_accelerator().current_device_name())
            dist.broadcast(values, group=group, group_src=0 if rank_of[0] < rank_of[-1] else 1)
            weight.data.copy_(values)
            REPLICATED.set(weight, topology.rank("pp") == rank_of[-1])


class TiedGradients:
    """Sums the gradient of a tied weight over the two ranks that hold it."""

    def __init__(self, slots: Sequence[Slot], topology: Topology, rank_of: Sequence[int]) -> None:
        """All ranks make it. ``slots``: of all weights; ``rank_of``: by stage, its pipeline rank."""
        self._slots = [slot for slot in slots if TIED_APART.get(slot.weight)]
        if rank_of[0] != rank_of[-1]:
            self._group = tied_group(topology, rank_of[0], rank_of[-1])

    @torch.no_grad()
    def add_up(self) -> None:
        """Sum the accumulated gradients over both ranks; a rank without a gradient adds zeros."""
        for slot in self._slots:
            value = slot.value()
            if value is None:
                slot.add(torch.zeros_like(slot.weight))
                value = slot.value()
            assert value is not None, "it was added"
            dist.all_reduce(value, group=self._group)
