"""Runs the actions of one rank of a pipeline schedule: whatever the schedule, one loop over its row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from ds_npu.parallel.micro_batch import new_forward
from ds_npu.parallel.pipeline.schedule import RESULTS, Action, Kind, Schedule
from ds_npu.parallel.pipeline.transfers import PipelineLinks, Tensors, differentiable
from ds_npu.parallel.turns import TURNS, Together, Turns


class WeightPart(Protocol):
    """Weight gradients that a backward has left for later."""

    def compute(self) -> None:
        """Compute them and add them to the others."""


class _NoWeights:
    """Of a backward that nothing trained stands before."""

    def compute(self) -> None:
        """There are none."""


class StageWork(Protocol):
    """One stage of a model on this rank."""

    def forward(self, micro_batch: int, arrived: Tensors | None) -> Tensors:
        """What the next stage is given, from what the stage before has sent (None in the first); last: the loss.

        It may be called twice for a micro-batch, without a graph and then with one.
        """

    def state(self) -> AbstractContextManager[object]:
        """A context in which a forward draws the random numbers that one would draw now."""

    def backward(self, outputs: Tensors, gradients: Tensors | None) -> WeightPart:
        """The backward of one forward's ``outputs`` (without ``gradients``: of the loss), weight gradients apart."""


@dataclass
class _Kept:
    """What one forward leaves for its backward."""

    arrived: Tensors | None
    outputs: Tensors
    """None of them until the recomputation, where there is one."""
    state: AbstractContextManager[object] | None = None
    """For the recomputation."""
    turns: Turns = field(default_factory=Turns)


class PipelineError(RuntimeError):
    """A pipeline that stopped; the text names the rank, the cell and what it waited for."""


OnFailure = Callable[[Action, Exception], None]
"""Told of the action of this rank that has failed; raises where the others cannot end the batch with it."""


class PipelineRun:
    """One run of ``schedule`` on one rank: every micro-batch forwards once, and backwards if the schedule has them.

    After an exception in a stage (and ``on_failure``) the rank computes nothing more, but goes on through its row: it
    receives what the others send, and sends zeros. So they come to the end of the batch, and no message is left over.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, StageWork],
        links: PipelineLinks,
        on_failure: OnFailure | None = None,
    ) -> None:
        """``stages``: by number, those of this rank. Without ``on_failure`` an exception ends the run at once."""
        self._on_failure = on_failure
        self.has_failed = False
        """Whether this rank computes no more, since it has failed or was sent nothing that it could compute with."""
        self._schedule, self._rank, self._stages, self._links = schedule, rank, stages, links
        self._goes_back = any(each.kind is not Kind.FORWARD for each in schedule.rows[rank])
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._handed: dict[Action, Tensors] = {}
        """Results that another stage of this rank is to take."""
        self._results: dict[Action, Tensors] = {}
        """Of what has run and is not handed on yet."""
        self._delivered: set[Action] = set()
        """Those whose results were handed to the stages that need them."""
        self._weights: dict[tuple[int, int], WeightPart] = {}
        self.losses: dict[int, torch.Tensor] = {}
        """By micro-batch, on the rank of the last stage, without graphs."""

    def run(self, shapes: Sequence[Hashable]) -> None:
        """Run all actions of the rank. Raises PipelineError where another rank has failed or does not answer.

        ``shapes``: by micro-batch, what its tensors' shapes and number depend on, equal on all ranks.
        """
        self._links.begin(self._schedule.messages[self._rank], shapes)
        schedule, index = self._schedule, 0
        with Together(self._links.device) if schedule.paired else nullcontext() as together:
            for step in schedule.steps(self._rank):
                arrived = tuple(self._arriving(action, index + place) for place, action in enumerate(step))
                self._attempt(step[0], partial(self._run, step, arrived, together))
                for action in step:
                    self._attempt(action, partial(self._deliver, action))
                    if self.has_failed and action not in self._delivered:
                        self._links.send_failed(action)
                index += len(step)
        self._links.finish()

    def _attempt(self, action: Action, compute: Callable[[], None]) -> None:
        """Run ``compute``, of ``action``, unless this rank has failed."""
        if self.has_failed:
            return
        try:
            compute()
        except Exception as error:
            if self._on_failure is None:
                raise
            self.has_failed = True
            for held in (self._kept, self._handed, self._results, self._weights):
                held.clear()
            self._on_failure(action, error)

    def _run(self, step: tuple[Action, ...], arrived: tuple[Tensors | None, ...], together: Together | None) -> None:
        """Run the one or two actions of ``step``, on what has ``arrived``; their results are not handed on yet."""
        first, *second = (self._prepared(*each) for each in zip(step, arrived, strict=True))
        if together is None or not second:
            first()
            return
        forward, backward = (self._kept[action.stage, action.micro_batch].turns for action in step)
        together.run(first, second[0], (forward, backward))

    def _prepared(self, action: Action, arrived: Tensors | None) -> Callable[[], None]:
        """What computes ``action``, which needs what has ``arrived``."""
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
        stage, kept = self._stages[action.stage], _Kept(arrived, ())
        if self._goes_back:
            self._kept[action.stage, action.micro_batch] = kept

        def compute() -> None:
            with new_forward() as micro_batch:
                TURNS.set(micro_batch, kept.turns)
                if action._replace(kind=Kind.RECOMPUTE) in self._schedule.cells:
                    kept.state = stage.state()
                    with torch.no_grad():
                        outputs = stage.forward(action.micro_batch, arrived)
                else:
                    kept.outputs = outputs = stage.forward(action.micro_batch, arrived)
            self._results[action] = tuple(each.detach() for each in outputs)

        return compute

    def _recompute(self, action: Action) -> None:
        """Run the forward again, as it ran, and keep its graph."""
        kept = self._kept[action.stage, action.micro_batch]
        assert kept.state is not None, "a forward that is recomputed has left a state"
        with kept.state:
            kept.outputs = self._stages[action.stage].forward(action.micro_batch, kept.arrived)

    def _backward(self, action: Action, gradients: Tensors | None) -> Callable[[], None]:
        place = action.stage, action.micro_batch

        def compute() -> None:
            kept, given = self._kept.pop(place), gradients
            outputs = differentiable(kept.outputs)
            if given is not None:
                outputs, given = _with_graph(outputs, given)
            if given is not None and not outputs:
                weights: WeightPart = _NoWeights()
            else:
                weights = self._stages[action.stage].backward(outputs, given)
            if kept.arrived is not None:
                self._results[action] = tuple(map(_gradient, differentiable(kept.arrived)))
            if action.kind is Kind.BACKWARD:
                weights.compute()
            else:
                self._weights[place] = weights

        return compute

    def _deliver(self, action: Action) -> None:
        """Hand on the result of ``action``, if it has one."""
        values = self._results.pop(action, None)
        if values is None:
            return
        if action.kind is Kind.FORWARD and action.stage == self._schedule.stages - 1:
            (self.losses[action.micro_batch],) = values
        else:
            self._given(action, values)

    def _given(self, action: Action, values: Tensors) -> None:
        """Hand the result of ``action`` to the stage that needs it."""
        stage = action.stage + (1 if action.kind is Kind.FORWARD else -1)
        if self._schedule.rank_of[stage] == self._rank:
            self._handed[action] = values
        else:
            self._links.send(action, values)

        self._delivered.add(action)

    def _arriving(self, action: Action, index: int) -> Tensors | None:
        """What ``action`` in cell ``index`` needs of another stage; None where it needs nothing, or after a failure."""
        needed = self._needed(action)
        if needed is None:
            return None
        source = self._schedule.rank_of[needed.stage]
        if source == self._rank:
            return self._handed.pop(needed, None)
        try:
            found = self._links.receive(needed)
        except RuntimeError as error:
            raise PipelineError(
                f"ds_npu.parallel.pipeline: rank {self._rank} waited in cell {index} ({action}) for {needed} of rank "
                f"{source}, which failed or did not answer in time: {error}"
            ) from error
        self.has_failed |= found is None
        return found

    def _needed(self, action: Action) -> Action | None:
        """The action of another stage whose result ``action`` computes with."""
        if action.kind is Kind.FORWARD:
            return Action(action.stage - 1, Kind.FORWARD, action.micro_batch) if action.stage > 0 else None
        if action.kind in RESULTS:
            return next((each for each in self._schedule.needs(action) if each.stage > action.stage), None)
        return None


def _with_graph(outputs: Tensors, gradients: Tensors) -> tuple[Tensors, Tensors]:
    """Without those of ``outputs`` that nothing trained has made: in a first stage of frozen weights, all of them."""
    kept = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
    return tuple(output for output, _ in kept), tuple(gradient for _, gradient in kept)


def _gradient(arrived: torch.Tensor) -> torch.Tensor:
    """Of what has arrived; zeros where the stage has used it for nothing."""
    return torch.zeros_like(arrived) if arrived.grad is None else arrived.grad
