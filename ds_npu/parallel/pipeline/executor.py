"""Execution of one rank's row of a pipeline schedule, in one loop for every schedule."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from ds_npu.parallel.pipeline.schedule import RECEIVES, SENDS, Action, Kind, Schedule
from ds_npu.parallel.pipeline.transfers import PipelineLinks, Tensors, differentiable
from ds_npu.parallel.runtime.micro_batch import new_forward
from ds_npu.parallel.runtime.paired_passes import PAIRED_PASS, PairedPass, PairRunner
from ds_npu.parallel.tensor.weight_gradient import QueuedGradients


class StageWork(Protocol):
    """One stage of a model on this rank."""

    def forward(self, micro_batch: int, arrived: Tensors | None) -> Tensors:
        """Compute the next stage's inputs (last stage: the loss) from this stage's, ``arrived`` (first stage: None).

        May be called twice for a micro-batch, first without a graph and then with one.
        """

    def state(self) -> AbstractContextManager[object]:
        """Save the random state; a forward in the returned context draws the numbers that it would draw now."""

    def backward(self, outputs: Tensors, gradients: Tensors | None) -> QueuedGradients:
        """Run the backward of ``outputs`` (``gradients`` None: of the loss); return the queued weight gradients."""


@dataclass
class _Kept:
    """The data that one forward leaves for its backward."""

    arrived: Tensors | None
    outputs: Tensors
    """The outputs with their graph; empty until the recomputation, where there is one."""
    state: AbstractContextManager[object] | None = None
    paired_pass: PairedPass = field(default_factory=PairedPass)


class PipelineError(RuntimeError):
    """A pipeline that stopped; the text names the rank, its cell and the action that it waited for."""


OnFailure = Callable[[Action, Exception], None]
"""A callback for this rank's failed action; raises where the other ranks cannot end the batch."""


class PipelineRun:
    """One run of ``schedule`` on one rank: every micro-batch forwards once, and backwards if the schedule has them.

    After an exception in a stage (and ``on_failure``) the rank computes nothing more, but goes on through its row: it
    receives all messages, and sends zeros. So the other ranks end the batch, and no message is left over.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, StageWork],
        links: PipelineLinks,
        on_failure: OnFailure | None = None,
    ) -> None:
        """``stages``: this rank's stages, by number. Without ``on_failure`` an exception ends the run at once."""
        self._on_failure = on_failure
        self.has_failed = False
        """Whether this rank computes no more, since it, or a rank that it receives from, has failed."""
        self._schedule, self._rank, self._stages, self._links = schedule, rank, stages, links
        self._goes_back = any(each.kind is not Kind.FORWARD for each in schedule.rows[rank])
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._results: dict[Action, Tensors] = {}
        """Results by action, until a stage of this rank uses them or they are sent."""
        self._weights: dict[tuple[int, int], QueuedGradients] = {}
        self.losses: dict[int, torch.Tensor] = {}
        """The losses by micro-batch, on the rank of the last stage, without graphs."""

    def run(self, shapes: Sequence[Hashable]) -> None:
        """Run all actions of the rank. Raises PipelineError where another rank has failed or does not answer.

        ``shapes``: for each micro-batch a key of the shapes and number of its tensors, equal on all ranks.
        """
        self._links.begin(self._schedule.messages[self._rank], shapes, self._schedule.acknowledged)
        with PairRunner(self._links.device) if self._schedule.paired else nullcontext() as runner:
            for step in self._schedule.with_transfers.steps(self._rank):
                if step[0].kind in RECEIVES:
                    self._receive(step[0])
                elif step[0].kind in SENDS:
                    self._send(step[0])
                else:
                    self._attempt(step[0], partial(self._run, step, runner))
        self._links.finish()

    def _attempt(self, action: Action, compute: Callable[[], None]) -> bool:
        """Run ``compute``, a part of ``action``, unless this rank has failed; return whether it ran to its end."""
        if self.has_failed:
            return False
        try:
            compute()
            return True
        except Exception as error:
            if self._on_failure is None:
                raise
            self.has_failed = True
            for held in (self._kept, self._results, self._weights):
                held.clear()
            self._on_failure(action, error)
            return False

    def _run(self, step: tuple[Action, ...], runner: PairRunner | None) -> None:
        first, *second = map(self._prepared, step)
        if runner is None or not second:
            first()
            return
        forward, backward = (self._kept[action.stage, action.micro_batch].paired_pass for action in step)
        runner.run(first, second[0], (forward, backward))

    def _prepared(self, action: Action) -> Callable[[], None]:
        """Return a function that computes ``action`` from its inputs, which have arrived."""
        source = self._schedule.source(action)
        arrived = None if source is None else self._results.pop(source)
        if action.kind is Kind.FORWARD:
            return self._forward(action, arrived)
        if action.kind is Kind.RECOMPUTE:
            return lambda: self._recompute(action)
        if action.kind is Kind.BACKWARD_WEIGHT:
            return self._weights.pop((action.stage, action.micro_batch)).compute
        return self._backward(action, arrived)

    def _forward(self, action: Action, arrived: Tensors | None) -> Callable[[], None]:
        for each in differentiable(arrived or ()):
            each.requires_grad_(self._goes_back)
        stage = self._stages[action.stage]
        kept = _Kept(arrived, ())
        if self._goes_back:
            self._kept[action.stage, action.micro_batch] = kept

        def compute() -> None:
            with new_forward() as micro_batch:
                PAIRED_PASS.set(micro_batch, kept.paired_pass)
                if action._replace(kind=Kind.RECOMPUTE) in self._schedule.cells:
                    kept.state = stage.state()
                    with torch.no_grad():
                        outputs = stage.forward(action.micro_batch, arrived)
                else:
                    kept.outputs = outputs = stage.forward(action.micro_batch, arrived)
            values = tuple(each.detach() for each in outputs)
            if action.stage == self._schedule.stages - 1:
                (self.losses[action.micro_batch],) = values
            else:
                self._results[action] = values

        return compute

    def _recompute(self, action: Action) -> None:
        """Run the forward again with the same random numbers, and keep its graph."""
        kept = self._kept[action.stage, action.micro_batch]
        assert kept.state is not None, "a forward that is recomputed has left a state"
        with kept.state:
            kept.outputs = self._stages[action.stage].forward(action.micro_batch, kept.arrived)

    def _backward(self, action: Action, gradients: Tensors | None) -> Callable[[], None]:
        key = action.stage, action.micro_batch

        def compute() -> None:
            kept, given = self._kept.pop(key), gradients
            outputs = differentiable(kept.outputs)
            if given is not None:
                outputs, given = _with_graph(outputs, given)
            weights = QueuedGradients({})
            if given is None or outputs:
                weights = self._stages[action.stage].backward(outputs, given)
            if kept.arrived is not None:
                self._results[action] = tuple(
                    torch.zeros_like(each) if each.grad is None else each.grad for each in differentiable(kept.arrived)
                )
            if action.kind is Kind.BACKWARD:
                weights.compute()
            else:
                self._weights[key] = weights

        return compute

    def _send(self, transfer: Action) -> None:
        """Send the result that ``transfer`` carries; zeros where this rank has failed."""
        action = self._schedule.carried[transfer]
        target = self._schedule.rank_of[self._schedule.transfers[action][1].stage]
        if not self._attempt(action, lambda: self._links.send(action, target, self._results.pop(action))):
            self._links.send_failed(action, target)

    def _receive(self, transfer: Action) -> None:
        """Wait for the result that ``transfer`` carries; it is dropped where this rank has failed."""
        action = self._schedule.carried[transfer]
        source = self._schedule.rank_of[action.stage]
        try:
            found = self._links.receive(action, source)
        except RuntimeError as error:
            waits = next(each for each in self._schedule.rows[self._rank] if self._schedule.source(each) == action)
            raise PipelineError(
                f"ds_npu.parallel.pipeline: rank {self._rank} waited in cell {self._schedule.cells[waits][1]} "
                f"({waits}) for {action} of rank {source}, which failed or did not answer in time: {error}"
            ) from error
        self.has_failed |= found is None
        if found is not None and not self.has_failed:
            self._results[action] = found


def _with_graph(outputs: Tensors, gradients: Tensors) -> tuple[Tensors, Tensors]:
    """Leave out ``outputs`` without a graph: all of them in a first stage of frozen weights."""
    kept = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
    return tuple(output for output, _ in kept), tuple(gradient for _, gradient in kept)
