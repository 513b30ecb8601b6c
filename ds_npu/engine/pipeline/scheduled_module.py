"""Trains the stages of a ``deepspeed.PipelineModule`` by a schedule of ds_npu.

DeepSpeed's engine (0.19.8, runtime/pipe/engine.py) loads the batches, reduces gradients, steps, evaluates and saves as
ever. The forwards, backwards and transfers of ``pipeline.schedule`` replace those of its TrainSchedule.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import BATCH_INPUT_TIMER, TRAIN_BATCH_TIMER
from deepspeed.runtime.torch_autocast import autocast_if_enabled

from ds_npu.config.pipeline import PipelineSection
from ds_npu.engine.failures.batch_checksum import BatchChecksum
from ds_npu.engine.failures.batch_failures import BatchFailures, BatchInStages
from ds_npu.engine.pipeline.engine_pipeline import HeldStage, check_scales_losses, pipeline_links
from ds_npu.features.pipeline.layout import PipelineLayout, layout_of
from ds_npu.parallel.pipeline.executor import PipelineRun
from ds_npu.parallel.pipeline.transfers import Tensors
from ds_npu.zero_ext.held_reduction import HeldReduction
from ds_npu.zero_ext.pending_gradients import PendingGradients, gradient_slots

INPUTS, LABELS = "inputs", "labels"
"""DeepSpeed's names of what it loads, by micro-batch."""


class _StageOfModule(HeldStage):
    """The stage of a PipelineModule that this rank has, on the batches that its engine has loaded."""

    def __init__(self, engine: Any, held: HeldReduction) -> None:
        super().__init__(engine, held)
        self.losses: dict[int, torch.Tensor] = {}
        """Losses by micro-batch in the last stage, without graphs."""

    def forward(self, micro_batch: int, arrived: Tensors | None) -> Tensors:
        engine = self.engine
        given: torch.Tensor | Tensors = self._loaded(INPUTS, micro_batch) if arrived is None else arrived
        if arrived is not None and len(arrived) == 1:
            given = arrived[0]
        # A copy: layers may change what they are given in place, and it may be needed again.
        copied = tuple(each.clone() for each in given) if isinstance(given, tuple) else given.clone()
        with autocast_if_enabled(engine):
            out = engine.module(copied)
            if not engine.is_last_stage():
                return _sent(out)
            loss_of = engine.module.loss_fn
            loss = out if loss_of is None else loss_of(out, self._loaded(LABELS, micro_batch))
        self.losses[micro_batch] = loss.detach()
        return (loss / engine.micro_batches,)

    def _loaded(self, what: str, micro_batch: int) -> Any:
        return self.engine.pipe_buffers[what][micro_batch]


def _sent(out: Any) -> Tensors:
    """The output of a stage as a tuple; raises TypeError for an output that the next stage would mistake."""
    if isinstance(out, torch.Tensor):
        return (out,)
    if isinstance(out, tuple) and len(out) > 1 and all(isinstance(each, torch.Tensor) for each in out):
        return out
    raise TypeError(
        f"the last layer of a stage returned a {type(out).__name__}; with ds_npu.pipeline.schedule, a tensor or a "
        "tuple of two or more tensors is accepted"
    )


class ScheduledModule:
    """Runs the micro-batches of one PipelineEngine, which is complete, by ``layout``, with one stage on each rank."""

    def __init__(self, engine: Any, layout: PipelineLayout) -> None:
        """Raises ValueError where the gradients of the engine cannot be held back, and for shapes that change."""
        check_scales_losses(engine)
        if engine.dynamic_shape or engine.module.get_additional_losses() is not None:
            raise ValueError(
                "ds_npu.pipeline.schedule: a PipelineModule with dynamic_shape or get_additional_losses is not "
                "supported; stages in the middle read no batch, and do not know when shapes change. What to do: "
                "dynamic_shape False, and engine.reset_activation_shape() before a batch of other shapes; or leave the "
                "key out"
            )
        self.engine, self.layout = engine, layout
        self.links = pipeline_links(engine.topology, engine.device, layout.rank_of)
        along = engine.topology.ranks("pp")
        # The ranks between them are given no batch.
        self.failures = BatchFailures(engine.topology, get_accelerator().device_name(), (along[0], along[-1]))
        self._read: list[Any] | None = None
        """The micro-batches that were read for the batch that is being loaded."""
        self.held = HeldReduction(engine, queue_weight_gradients=layout.splits_backward)
        self.shapes = 0
        """A number that changes with the shapes of the tensors between stages."""

    def train(self) -> None:
        """One optimizer step on the next batches of the engine's data; ``total_loss`` is the sum of their losses.

        Raises PipelineError on all ranks where one of them has failed, and StopIteration at the end of the data; then
        the engine is as it was before, but for the data that was read.
        """
        engine = self.engine
        try:
            if engine.inside_no_sync_ctxt:
                raise RuntimeError(
                    "engine.train_batch inside of engine.no_sync(): it ends in a step of the optimizer. What to do: "
                    "call it outside, with more micro-batches (gradient_accumulation_steps)"
                )
            engine.tput_timer.start()
            losses = self._run(engine.micro_batches)
            if engine.is_last_stage():
                engine.total_loss = torch.stack([losses[index] for index in range(engine.micro_batches)]).sum()
            engine._exec_reduce_tied_grads()
            engine._exec_reduce_grads()
            engine._exec_optimizer_step()
        except BaseException:
            # DeepSpeed has started these timers for a batch that has failed; its time is not counted.
            for name in (TRAIN_BATCH_TIMER, BATCH_INPUT_TIMER):
                engine.timers(name).started_ = False
            engine.tput_timer.started = False
            raise

    def _run(self, count: int) -> dict[int, torch.Tensor]:
        """Run ``count`` micro-batches and reduce their gradients; return the last stage's losses by micro-batch.

        Where it raises, the gradients are dropped.
        """
        engine = self.engine
        schedule = self.layout.make(count)
        stage = _StageOfModule(engine, self.held)
        batch = self.failures.begin(schedule, trains=True)
        try:
            with self.held:
                with self.failures.or_broken():
                    self._load(batch, count)
                    stages = {engine.stage_id: stage}
                    run = PipelineRun(schedule, engine.stage_id, stages, self.links, batch.note)
                    run.has_failed = batch.has_failed
                    run.run([self.shapes] * count)
                batch.end()
        except BaseException:
            PendingGradients(gradient_slots(engine)).drop()
            raise
        finally:
            for loaded in (engine.pipe_buffers[INPUTS], engine.pipe_buffers[LABELS]):
                loaded[:] = [None] * len(loaded)
        return stage.losses

    def _load(self, batch: BatchInStages, count: int) -> None:
        """Load ``count`` micro-batches, in the first stage and in the last one; a failure is noted."""
        engine, index = self.engine, 0
        if not (engine.is_first_stage() or engine.is_last_stage()):
            return
        try:
            self._read = []
            engine._reserve_pipe_buffers(count)
            for index in range(count):
                engine._exec_load_micro_batch(index)
            batch.checksum = BatchChecksum(self._read)
        except Exception as error:
            batch.note_loading(engine.stage_id, index, error)
        finally:
            self._read = None

    def has_read(self, micro_batch: Any) -> None:
        """Note what the engine has read, inputs and labels, of which a stage keeps one."""
        if self._read is not None:
            self._read.append(micro_batch)


def scheduled_module(engine: Any, section: PipelineSection) -> ScheduledModule | None:
    """The ScheduledModule of ``engine`` if ``section`` asks for a schedule or recomputation; None: DeepSpeed trains."""
    if section.schedule is None and section.recompute is None:
        return None
    if engine.has_own_schedule:
        raise ValueError(
            f"ds_npu.pipeline.schedule for a {type(engine.module).__name__}, which has a schedule of its own. What to "
            "do: leave the key out, or make a deepspeed.pipe.PipelineModule"
        )
    return ScheduledModule(engine, layout_of(section, engine.num_stages))
