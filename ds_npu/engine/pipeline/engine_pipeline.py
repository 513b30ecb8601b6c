"""Runs the batches of one engine, whose model is in stages, through the ranks along pp."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import nn

from ds_npu.comm.communicator import Link, open_links
from ds_npu.config.pipeline import PipelineSection
from ds_npu.engine.failures.batch_checksum import BatchChecksum
from ds_npu.engine.failures.batch_failures import BatchFailures, BatchInStages
from ds_npu.engine.pipeline.stage_output import LOSS, OutputForm, StageOutputs, detached, tensors_of, training_output
from ds_npu.engine.same_batch import agree_before_stages, shared_axes
from ds_npu.features.loss.model_loss import COUNT, asks_for_scores
from ds_npu.features.pipeline.batch_loss import BatchLoss, Items, divided_by, with_graph, with_loss
from ds_npu.features.pipeline.images import check_no_pixels, image_pieces
from ds_npu.features.pipeline.layout import PipelineLayout, check_recomputed_once, layout_of
from ds_npu.features.pipeline.micro_batches import cut, samples_of, shape_of
from ds_npu.features.pipeline.stages import check_arguments, run_stage
from ds_npu.memory.call_state import CallState
from ds_npu.parallel.pipeline.executor import PipelineRun
from ds_npu.parallel.pipeline.pass_through import Stage, stages_in
from ds_npu.parallel.pipeline.schedule import Schedule
from ds_npu.parallel.pipeline.transfers import PipelineLinks, Tensors
from ds_npu.parallel.runtime.calls import Keywords
from ds_npu.parallel.tensor.randomness import RegionRandomness
from ds_npu.planner.communicators import PAIR_BUFFER, default_mib
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.held_reduction import HeldReduction, add_missing
from ds_npu.zero_ext.pending_gradients import PendingGradients, TiedGradients, gradient_slots

WITHOUT_THEIR_LOSS = (
    "ds_npu.moe.aux_loss and z_loss are added to the loss that a model returns, and this batch is to return "
    "log-probabilities, of which the caller makes a loss of its own (TRL). What to do: leave them out"
)


def own_layout(section: PipelineSection, model: nn.Module, topology: Topology) -> PipelineLayout | None:
    """The layout of the stages that ``model`` is in; None where it is not. Raises ValueError for other stages."""
    own = [stage.index for stage in stages_in(model)]
    if not own:
        return None
    layout = layout_of(section, topology.size("pp"))
    expected = layout.own(topology.rank("pp"))
    if own != expected:
        raise ValueError(
            f"{type(model).__name__} has the stages {own} of {stages_in(model)[0].count}, and the schedule "
            f"{layout.name} of ds_npu.pipeline needs {expected} of {layout.stages} on this rank"
        )
    return layout


@dataclass
class RunningMicroBatches:
    """The micro-batches of one run."""

    parts: Sequence[Keywords]
    checksum: BatchChecksum
    """The checksum of the batch that they were cut from."""
    items: Items | None
    """The number of items that divides their losses; None: losses are averaged."""
    trains: bool
    scores: bool = False
    """Whether scores of tokens are returned in training, too."""
    form: OutputForm | None = None
    """In training, the form of the last stage's output."""
    outputs: dict[int, Any] = field(default_factory=dict)
    """Outputs of the last stage by micro-batch, where more than the loss is returned."""
    losses: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """Shares of the loss by micro-batch and stage of this rank, without graphs."""

    @property
    def own_outputs(self) -> list[Any]:
        """The outputs in the order of the micro-batches."""
        return [self.outputs[index] for index in sorted(self.outputs)]


class HeldStage:
    """A stage of an engine's model whose backwards reduce no gradient."""

    def __init__(self, engine: Any, held: HeldReduction) -> None:
        self.engine, self.held = engine, held

    def state(self) -> AbstractContextManager[object]:
        return CallState(get_accelerator().device_name()).restored()

    def backward(self, outputs: Tensors, gradients: Tensors | None) -> Any:
        if gradients is None:
            outputs = (loss_scaled(self.engine, outputs[0]),)
        return self.held.backward(outputs, gradients)


class StageOfEngine(HeldStage):
    """One stage of an engine's model, on the micro-batches of one batch."""

    def __init__(self, pipeline: EnginePipeline, stage: Stage, batch: RunningMicroBatches) -> None:
        super().__init__(pipeline.engine, pipeline.held)
        self.pipeline, self.stage, self.batch = pipeline, stage, batch

    def forward(self, micro_batch: int, arrived: Tensors | None) -> Tensors:
        engine, batch = self.engine, self.batch
        losses: list[torch.Tensor] = []
        with self.pipeline.random_numbers(), autocast_if_enabled(engine), divided_by(batch.items):
            out = run_stage(engine.module, self.stage, arrived, losses, **batch.parts[micro_batch])
        own = None
        if losses and batch.trains:
            if batch.scores:
                raise ValueError(WITHOUT_THEIR_LOSS)
            own = self.pipeline.loss.share(torch.stack(losses).sum(), batch.parts, micro_batch, batch.items)
            batch.losses[micro_batch, self.stage.index] = own.detach()
        if self.stage.index < self.stage.count - 1:
            hidden, *others = out
            return (hidden if own is None else with_loss(hidden, loss_scaled(engine, own)), *others)
        if not batch.trains or batch.scores:
            batch.outputs[micro_batch] = detached(out)
        if not batch.trains:
            return (torch.zeros((), device=engine.device),)
        loss = tensors_of(out).get(LOSS)
        if loss is None or loss.dim() > 0:
            raise ValueError(
                f"{type(engine.module).__name__} returned a {type(out).__name__} without a loss, which the last stage "
                "of ds_npu.parallel.pipeline computes. What to do: return a scalar, a tuple that begins with one, or a "
                "mapping with the key loss"
            )
        batch.form = batch.form or OutputForm.of(out)
        loss = loss if batch.items is not None else loss / len(batch.parts)
        loss = loss if own is None else loss + own
        batch.losses[micro_batch, self.stage.index] = loss.detach()
        return (loss,)


def loss_scaled(engine: Any, loss: torch.Tensor) -> torch.Tensor:
    """``loss`` as DeepSpeed's engine.backward scales it (0.19.8 runtime/engine.py)."""
    if isinstance(engine.optimizer, ZeROOptimizer):
        scaled: torch.Tensor = engine.optimizer.scale_if_loss(loss)
        return scaled
    scaler = engine.torch_autocast_z0_gradscaler
    return scaler.scale(loss) if scaler else loss


def check_not_profiled(engine: Any) -> None:
    """Raise ValueError where DeepSpeed's profiler is to count the operations of forwards, in which backwards run."""
    if engine.flops_profiler_enabled():
        raise ValueError(
            "flops_profiler.enabled: found true in pipeline stages. DeepSpeed's profiler divides what it has counted "
            "in the forward of a whole model by the seconds of the forward and of the backward, and engine(batch) "
            "runs both of this rank's stages. What to do: leave it out, or profile with ds_npu.parallel.pipeline 1"
        )


def check_scales_losses(engine: Any) -> None:
    """Raise ValueError where the gradients of ``engine`` are divided by a loss scale that no loss is multiplied by."""
    if engine.fp16_enabled() and not engine.zero_optimization():
        raise ValueError(
            "fp16 without ZeRO: DeepSpeed 0.19.8 does not multiply the loss by the loss scale there, but divides "
            "gradients by it. What to do: zero_optimization.stage 1 or 2, or bf16"
        )


def pipeline_links(topology: Topology, device: torch.device, rank_of: Sequence[int]) -> PipelineLinks:
    """Links between the ranks along pp, on groups of their own; over hccl their communicators are opened.

    ``rank_of``: the pipeline rank of each stage. Raises ValueError where pairs of ranks have no communicators over
    hccl, and several stages on a rank need them.
    """
    every, ranks = [range(topology.size("pp"))], topology.ranks("pp")
    if dist.get_backend() == "hccl" and default_mib(PAIR_BUFFER) == 0 and len(rank_of) > len(ranks) > 2:
        raise ValueError(
            f"{PAIR_BUFFER} is 0, so that the {len(ranks)} pipeline ranks send over one communicator, in which each "
            f"message waits for those before it; with {len(rank_of)} stages ranks would wait for each other for ever. "
            f"What to do: unset {PAIR_BUFFER}, or give each rank one stage (ds_npu.pipeline.schedule 1f1b)"
        )
    up, down = (topology.within("pp", every, f"to {which} ranks", own=True) for which in ("higher", "lower"))
    borders = {tuple(sorted((rank_of[stage], rank_of[stage + 1]))) for stage in range(len(rank_of) - 1)}
    # Borders of every other rank come first, since these are opened in parallel.
    for low, high in sorted(borders, key=lambda each: (each[0] % 2, each)):
        if low != high:
            low, high = ranks[low], ranks[high]
            open_links((Link(up, low, high), Link(down, high, low)), "neighbouring stages")
    return PipelineLinks((up, down), device)


class EnginePipeline:
    """Runs the batches of one engine, which is complete, through the ranks along pp."""

    def __init__(self, engine: Any, layout: PipelineLayout, micro_batches: int | None) -> None:
        """``micro_batches``: into how many a batch is cut; None: one for each sample.

        Raises ValueError where the gradients of the engine cannot be held back until a batch has been through.
        """
        check_scales_losses(engine)
        check_not_profiled(engine)
        self.engine, self.layout, self.micro_batches = engine, layout, micro_batches
        topology: Topology = engine.topology
        self.rank = topology.rank("pp")
        self.links = pipeline_links(topology, engine.device, layout.rank_of)
        self.outputs = StageOutputs(topology.group("pp"), layout.last_rank, engine.device)
        self.random_numbers = RegionRandomness(topology, get_accelerator().device_name(), "pp").region
        self.stages = {stage.index: stage for stage in stages_in(engine.module)}
        self.loss = BatchLoss(engine.module)
        self.signature = inspect.signature(engine.module.forward)
        self.held = HeldReduction(engine, queue_weight_gradients=layout.splits_backward)
        peers = topology.ranks(*shared_axes(engine.module, topology))
        self.failures = BatchFailures(topology, get_accelerator().device_name(), peers)
        self.pending = PendingGradients(gradient_slots(engine))
        self.tied = TiedGradients(self.pending.slots, topology, layout.rank_of)
        self._has_begun = False
        self.handle: torch.Tensor | None = None
        """The loss that was returned, and whose gradients are pending."""
        self.is_unreduced = False
        """Whether the gradients that were committed last are this rank's alone, and not reduced."""

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Keywords:
        """The arguments of a forward by name."""
        bound = self.signature.bind(*args, **kwargs)
        several = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
        collected = {name for name, each in self.signature.parameters.items() if each.kind in several}
        given = {name: value for name, value in bound.arguments.items() if name not in collected}
        return kwargs | given | ({"use_cache": False} if "use_cache" in self.signature.parameters else {})

    def batch(self, given: Keywords, trains: bool) -> RunningMicroBatches:
        """The micro-batches of the batch with the arguments ``given``."""
        # Checked on every rank before any begins: a rank that refuses later leaves the others waiting for it.
        self._check(given, trains)
        samples = samples_of(given)
        count = min(self.micro_batches or samples, samples)
        parts = cut(given, count, image_pieces(self.engine.module, given, count))
        self._agree(given, parts)
        scores = asks_for_scores(given)
        items = self.loss.items_of_scores(parts) if scores else self.loss.items(parts)
        if items is not None and (scores or self.engine.topology.size("cp") > 1):
            # Context ranks divide their shares themselves, and so does a fused head.
            parts = [{**part, COUNT: items} for part in parts]
        return RunningMicroBatches(parts, BatchChecksum(given), items, trains, scores)

    def _check(self, given: Keywords, trains: bool) -> None:
        """Raise ValueError for what stages cannot be given."""
        check_arguments(self.engine.module, given)
        if self.engine.topology.size("cp") > 1:
            check_no_pixels(self.engine.module, given)
        if trains:
            self.loss.check_labels(given)

    def _agree(self, given: Keywords | Sequence[Keywords], parts: Sequence[Keywords]) -> None:
        """Agree with all ranks before the micro-batches ``parts`` of the batch ``given`` run."""
        if not self._has_begun:
            self._has_begun = True
            if self.layout.recomputes:
                check_recomputed_once(self.engine.module)
            model = self.engine.module
            opened = partial(self.engine.open_other_communicators, model)
            agree_before_stages(model, self.engine.topology, given, parts[0], opened)
        self._check_alike(len(parts))

    def _check_alike(self, count: int) -> None:
        """Raise ValueError where data ranks that share experts have other numbers of micro-batches."""
        topology: Topology = self.engine.topology
        if topology.size("ep") == 1 or topology.size("dp") == 1:
            return
        counts = [0] * topology.size("dp")
        # Once in a batch; a rank with more of them would wait for the others' experts for ever.
        dist.all_gather_object(counts, count, group=topology.group("dp"))
        if len(set(counts)) > 1:
            raise ValueError(
                f"the data ranks have {', '.join(map(str, counts))} micro-batches, and share experts "
                "(ds_npu.parallel.expert), which all of them call together. What to do: as many samples on every rank, "
                "as drop_last of a loader leaves"
            )

    def train(self, batch: RunningMicroBatches) -> Any:
        """Run ``batch``, with gradients pending until ``commit``; return the output, whose loss has its own graph."""
        form, loss = self._trained(batch)
        if batch.scores:
            assert self.handle is not None and batch.items is not None
            out = self.outputs.of_evaluation(batch.own_outputs, averages=False)
            with_graph(out, self.handle, batch.items)
            return out
        return training_output(form, loss)

    def train_parts(self, parts: Sequence[Keywords]) -> torch.Tensor:
        """Run the micro-batches ``parts`` as ``train`` does; return the mean of their losses."""
        for part in parts:
            self._check(part, trains=True)
        self._agree(parts, parts)
        return self._trained(RunningMicroBatches(parts, BatchChecksum(parts), None, trains=True))[1]

    def _trained(self, batch: RunningMicroBatches) -> tuple[OutputForm, torch.Tensor]:
        self.drop()
        self.held.hold()
        self.pending.begin()
        key = tuple(sorted((name, value is None) for name, value in batch.parts[0].items()))
        try:
            running = self._run(self.layout.make(len(batch.parts)), batch)
            # Summed in an order that does not depend on the schedule.
            losses = [batch.losses[each] for each in sorted(batch.losses)]
            found = self.outputs.of_training(batch.form, losses, key)
            running.end()
        except BaseException:
            self.drop()
            raise
        assert found is not None, "no rank has failed"
        form, loss = found
        self.handle = loss.requires_grad_()
        # A copy: the caller may scale it in place.
        return form, self.handle * 1

    def evaluate(self, batch: RunningMicroBatches) -> Any:
        """Run the forwards of ``batch``; return the output, the same on every rank along pp."""
        with torch.no_grad():
            running = self._run(self.layout.forwards(len(batch.parts)), batch)
            out = self.outputs.of_evaluation(batch.own_outputs, averages=batch.items is None)
            running.end()
            return out

    def _run(self, schedule: Schedule, batch: RunningMicroBatches) -> BatchInStages:
        """Run the micro-batches of ``batch``; the caller must ``end`` the result, which raises if a rank has failed.

        An exception raised here leaves the ranks out of step: the engine runs no further batch.
        """
        stages = {index: StageOfEngine(self, stage, batch) for index, stage in self.stages.items()}
        running = self.failures.begin(schedule, batch.trains)
        running.checksum = batch.checksum
        run = PipelineRun(schedule, self.rank, stages, self.links, running.note)
        with self.failures.or_broken():
            run.run([shape_of(part) for part in batch.parts])
        if run.has_failed:
            batch.outputs.clear()
            batch.losses.clear()
        return running

    @property
    def is_pending(self) -> bool:
        """Whether gradients wait for ``commit``."""
        return self.handle is not None

    def commit(self, loss: torch.Tensor) -> None:
        """Scale the pending gradients by the derivative of ``loss`` by the returned loss; reduce them at a boundary.

        Raises ValueError where ``loss`` is made of anything else, whose gradients would be missing.
        """
        if self.handle is None:
            raise RuntimeError(
                "engine.backward: no gradients are pending. What to do: call engine(batch) in training mode before "
                "each backward; ds_npu.parallel.pipeline computes them there"
            )
        others = [node for node in accumulating_nodes(loss) if node.variable is not self.handle]
        if others or not loss.requires_grad:
            what = f"a tensor {list(others[0].variable.shape)}, too" if others else "nothing that was returned"
            raise ValueError(
                f"engine.backward: the loss is made of {what}. In pipeline stages the gradients of the loss that "
                "engine(batch) returned are there already, and can only be scaled. What to do: add other terms in the "
                "model's forward, or ds_npu.parallel.pipeline 1"
            )
        (factor,) = torch.autograd.grad(loss, self.handle)
        self.handle = None
        self.pending.commit(factor)
        self.is_unreduced = not self.held.reduces_now
        if not self.is_unreduced:
            self.tied.add_up()
        self.held.release()

    def complete(self) -> None:
        """Prepare what was committed for a reduction that DeepSpeed makes; forget what is pending."""
        self.drop()
        self.tied.add_up()
        add_missing(self.engine.optimizer)
        self.is_unreduced = False

    def drop(self) -> None:
        """Forget gradients that are pending."""
        self.handle = None
        if self.held.is_held:
            self.held.abandon()
            self.pending.drop()


def accumulating_nodes(loss: torch.Tensor) -> list[Any]:
    """The nodes of the graph of ``loss`` that accumulate gradients."""
    found, seen, todo = [], set[Any](), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            found.append(node)
        todo += [each for each, _ in node.next_functions]
    return found
