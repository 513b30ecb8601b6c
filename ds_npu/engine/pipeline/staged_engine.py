"""Engines of models in pipeline stages: ``engine(batch)`` runs a schedule, forwards and backwards, and gives the loss.

``engine.backward(loss)`` then takes from autograd what the caller has made of the loss (divided it by accumulation
steps, multiplied it by a number of ranks), and scales the gradients, which are there already, accordingly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ds_npu.engine.pipeline.engine_pipeline import EnginePipeline
from ds_npu.engine.topology_engine import TopologyEngine
from ds_npu.parallel.pipeline.pass_through import BORDER_STATES
from ds_npu.parallel.runtime.calls import Keywords
from ds_npu.parallel.runtime.forward_wraps import Level, wrap_forward
from ds_npu.parallel.runtime.micro_batch import running


class StagedEngine(TopologyEngine):
    """DeepSpeedEngine's calls, for a model in stages."""

    pipeline: EnginePipeline
    _runs = False
    """Whether a batch is being run: DeepSpeed's forward hooks then ignore its micro-batches."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output for a batch, the same on every pipeline rank; in training its gradients are computed, too.

        In training only the ``loss`` of the output is there. Raises ValueError for a batch that cannot be cut into
        micro-batches, and PipelineError where another rank has failed.
        """
        trains = self.module.training and torch.is_grad_enabled()
        batch = self.pipeline.batch(self.pipeline.arguments(args, kwargs), trains)
        with _Counted(self):
            return self.pipeline.train(batch) if trains else self.pipeline.evaluate(batch)

    def run_in_stages(self, pipeline: EnginePipeline) -> None:
        """Run batches by ``pipeline``, also those that are given to the model itself, as the Trainer evaluates."""
        self.pipeline = pipeline

        def forward(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            is_stage = BORDER_STATES.of(running()) is not None
            return own(*args, **kwargs) if is_stage else self.forward(*args, **kwargs)

        wrap_forward(self.module, forward, Level.MODEL)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        """Take over the gradients of the last batch, times the derivative of ``loss`` by the loss that was returned.

        Raises ValueError where ``loss`` has another part, and RuntimeError where no gradients are pending.
        """
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        self.pipeline.commit(loss)
        return loss.detach()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's; raises RuntimeError where the gradients of a batch were not taken over, or not reduced."""
        if self.pipeline.is_pending:
            raise RuntimeError(
                "engine.step: the gradients of the last engine(batch) wait for engine.backward(loss). What to do: call "
                "it before engine.step(); loss.backward() does not reach them"
            )
        # Inside of no_sync DeepSpeed itself refuses.
        if self.pipeline.is_unreduced and super().is_gradient_accumulation_boundary() and not self.inside_no_sync_ctxt:
            raise RuntimeError(
                "engine.step: the gradients of the last engine.backward(loss) were not reduced, since it was called "
                "inside of engine.no_sync() or before engine.set_gradient_accumulation_boundary(True). What to do: run "
                "the last batch of an accumulation, its backward too, outside of no_sync and at a boundary"
            )
        return super().step(*args, **kwargs)

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """As DeepSpeed's: the gradients of all batches in this context are reduced at its end."""
        with super().coalesce_grad_reduction():
            try:
                yield
            finally:
                self.pipeline.complete()

    def factor_of_gradients(self) -> float | None:
        """The factor that the caller's use of the loss gives the last batch's gradients; None before it is known."""
        factor = self.pipeline.pending.factor
        return None if factor is None else float(factor)

    def train_batch(self, data_iter: Iterator[Any]) -> torch.Tensor:
        """One optimizer step on ``gradient_accumulation_steps`` batches of ``data_iter``, each one micro-batch.

        Returns the mean of their losses. A batch is a mapping of the model's arguments, or a sequence of them. Raises
        RuntimeError in the middle of an accumulation and inside of ``no_sync``.
        """
        steps = self.gradient_accumulation_steps()
        if self.inside_no_sync_ctxt:
            raise RuntimeError(
                "engine.train_batch inside of engine.no_sync(): it ends in a step of the optimizer. What to do: call "
                "it outside, or call engine(batch) and engine.backward(loss) there"
            )
        if self.micro_steps % steps:
            raise RuntimeError("engine.train_batch: an accumulation has begun; call engine.step() to its end first")
        parts = [self._arguments(next(data_iter)) for _ in range(steps)]
        with _Counted(self):
            loss = self.pipeline.train_parts(parts)
        # Its last micro-batch is the boundary.
        self.micro_steps += steps - 1
        self.backward(loss, scale_wrt_gas=False)
        self.step()
        return loss.detach()

    def _arguments(self, batch: Any) -> Keywords:
        args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else (batch, {})
        found = self.pipeline.arguments(args, kwargs)
        return {name: each.to(self.device) if isinstance(each, torch.Tensor) else each for name, each in found.items()}

    def _forward_prologue(self, inputs: Any, kwargs: Any) -> Any:
        if not self._runs:
            return super()._forward_prologue(inputs, kwargs)
        # The one thing that DeepSpeed does before a forward and that a micro-batch needs.
        return (self._cast_inputs_half(inputs), kwargs) if self.fp16_auto_cast() else None

    def _forward_epilogue(self) -> None:
        if not self._runs:
            super()._forward_epilogue()


class _Counted:
    """DeepSpeed's timers and profiler around one batch, not around each of its micro-batches."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._engine._forward_prologue((), {})
        self._engine._runs = True

    def __exit__(self, *error: object) -> None:
        self._engine._runs = False
        self._engine._forward_epilogue()
