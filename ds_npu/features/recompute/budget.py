"""``ds_npu.recompute.budget_gib``: the first two optimizer steps are recorded; from then on a plan is followed.

In the recorded steps every block is computed again, so that they need the least memory: shapes tell what blocks would
keep, and how long operators take. All ranks of a pipeline stage get one plan. A budget that no plan keeps is an error
before the second optimizer step: the first one has shown what the optimizer needs, and what state it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from ds_npu.config.recompute import RecomputeSection
from ds_npu.config.roles import Role
from ds_npu.features.build import Build
from ds_npu.features.declaration import Change
from ds_npu.features.recompute.recorded_steps import RecordedSteps
from ds_npu.log import logger, warn_once
from ds_npu.memory.storage_record import AllocatorMeter, PeakMeter, StorageMeter, StorageRecord
from ds_npu.models.kinds import own_shapes
from ds_npu.parallel.runtime.marks import Mark
from ds_npu.planner.memory_plan import BudgetError, Moment, Option, PlannedLayer, best_plan
from ds_npu.planner.memory_plan_table import (
    ATTENTION,
    GIB,
    KEY,
    LOSS,
    MIB,
    MLP,
    Buckets,
    Modules,
    PlannedKeys,
    StagePlan,
    budget_refusal,
    plan_lines,
    planned_keys,
    size_text,
    too_early,
)
from ds_npu.planner.swap_pattern import SwapPattern, patterns, stage_ends
from ds_npu.zero_ext.bucketed_zero import BUCKETED
from ds_npu.zero_ext.method_wraps import MethodLevel
from ds_npu.zero_ext.training_engine import TrainingEngine
from ds_npu.zero_ext.weight_gathers import GATHERS

CPU = "cpu"
MARGIN = MIB
"""Bytes for small tensors (scalars of optimizers and scripts) that are made after the recorded steps."""
PLANNED: Mark[PlannedKeys] = Mark("memory plan")
"""The keys of the plan that a model follows."""


def plan_part(section: RecomputeSection, build: Build) -> Iterable[Change]:
    """The part of an engine that makes the plan."""
    if section.budget_gib is None:
        return
    what = f"a plan of recomputation for {section.budget_gib:g} GiB, made from the first two steps"
    yield build.installed("a plan of activations", what, MemoryBudget(section.budget_gib, build).install)


@dataclass(frozen=True)
class _Recorded:
    stage: int
    layers: tuple[PlannedLayer, ...]
    moments: tuple[Moment, ...]
    modules: Modules


class MemoryBudget:
    """Plans for the model of ``build``; the driver of the features changes the model by the plan."""

    def __init__(self, budget_gib: float, build: Build) -> None:
        self.budget_gib, self._build = budget_gib, build
        self._buffer_bytes = 0
        self._keep_weights: Callable[[int], int] | None = None
        """Makes ZeRO 3 keep weights of up to so many bytes gathered between steps; returns their bytes."""

    def install(self, engine: TrainingEngine) -> list[str]:
        """Record the first two steps of ``engine``."""
        if PLANNED.get(self._build.model) is not None:
            return [f"{KEY}: the model follows the plan that was made before"]
        self._build.makes_plans = True
        updates, followed, follows = 0, False, False

        def before_step() -> None:
            nonlocal followed, follows
            followed = follows
            if not follows:
                self._recorded.end_of_backward()
                follows = self._plan(updates, partial(gradient_buckets, engine))

        def after_step() -> None:
            nonlocal updates
            # A step that is skipped (fp16) has made no state of the optimizer yet.
            updates += engine.was_step_applied()
            if followed:
                self._check_peak()

        engine.events.before_step(MethodLevel.MEMORY_PLAN, before_step)
        engine.events.after_step(MethodLevel.MEMORY_PLAN, after_step)
        self._buffer_bytes = 0 if self._build.device_type == CPU else engine.communicator_bytes() + MARGIN
        gathers = GATHERS.get(engine.optimizer)
        self._keep_weights = None if gathers is None else gathers.keep
        self._meter, self._stop = meter_of(engine, self._build.device_type)
        self._recorded = RecordedSteps(self._build, self._meter, self._build.machine)
        self._recorded.wrap()
        return [f"{KEY}: the first two steps compute every block again, and are recorded"]

    def _plan(self, updates: int, buckets: Callable[[], Buckets | None]) -> bool:
        """Make a plan; follow it if the optimizer has made a step before, and return whether it has.

        Nothing is decided before that step, in which the optimizer makes its state and needs memory for it. After it,
        raises ValueError where no plan works.
        """
        stages, errors = self._planned()
        if errors and updates:
            raise ValueError(budget_refusal(errors, self.budget_gib, self._buffer_bytes, buckets()))
        if errors and dist.get_rank() == 0:
            warn_once(too_early(errors, self.budget_gib, self._buffer_bytes))
        if updates:
            self._follow(stages)
        return updates > 0

    def _planned(self) -> tuple[list[StagePlan], dict[int, BudgetError]]:
        """The plans of all stages, or the error of each stage without one; every rank calls it at the same time."""
        topology = self._build.topology
        recorded = self._recorded
        layers = recorded.layers
        modules = {each.name: {part: recorded.modules(each.name, part) for part in (ATTENTION, MLP)} for each in layers}
        mine = _Recorded(topology.rank("pp"), layers, recorded.moments, modules)
        every: list[_Recorded] = [mine] * dist.get_world_size()
        # This runs twice at most.
        dist.all_gather_object(every, mine)
        peers = [rank for rank, each in enumerate(every) if each.stage == mine.stage]
        found: StagePlan | BudgetError | None = None
        if dist.get_rank() == peers[0]:
            found = self._best([every[rank] for rank in peers])
        results: list[tuple[int, StagePlan | BudgetError | None]] = [(mine.stage, found)] * len(every)
        dist.all_gather_object(results, (mine.stage, found))
        errors = {stage: each for stage, each in results if isinstance(each, BudgetError)}
        plans = [each for _, each in results if isinstance(each, StagePlan)]
        return sorted(plans, key=lambda each: each.stage), errors

    def _best(self, ranks: Sequence[_Recorded]) -> StagePlan | BudgetError:
        """One plan for the ranks of a stage, by the most that any of them needs.

        The error, where no plan works.
        """
        layers = tuple(map(_joined, zip(*(each.layers for each in ranks), strict=True)))
        moments = tuple(dict.fromkeys(moment for each in ranks for moment in each.moments))
        try:
            plan = best_plan(layers, moments, self._tensor_bytes(), self._swapped(layers, moments))
        except BudgetError as error:
            return error
        return StagePlan(ranks[0].stage, layers, moments, ranks[0].modules, plan)

    def _tensor_bytes(self) -> int:
        """The bytes of the budget that tensors may take."""
        return int(self.budget_gib * GIB) - self._buffer_bytes

    def _swapped(self, layers: Sequence[PlannedLayer], moments: Sequence[Moment]) -> Iterable[SwapPattern]:
        """Patterns of layers that may be swapped; none on the CPU, where host and device share memory."""
        build = self._build
        # Waiting calls are told apart by their progress, so a layer may be called only once in a forward.
        unknown = not build.is_cut_into_stages and any(count > 1 for moment in moments for count in moment.calls)
        # With experts, the bytes that simulated NPUs held depended on timing.
        if build.device_type == CPU or build.block_plan.named(Role.MOE) or unknown:
            return ()
        blocks = [each for each in layers if each.name != LOSS]
        *ends, _ = stage_ends([each.name for each in blocks], build.block_plan.stages)
        return patterns([each.forward_seconds for each in blocks], build.machine.host, ends)

    def _follow(self, stages: Sequence[StagePlan]) -> None:
        self._recorded.unwrap()
        self._stop()
        self._build.planned = planned_keys(stages)
        PLANNED.set(self._build.model, self._build.planned)
        lines = [*plan_lines(stages, self.budget_gib, self._buffer_bytes, self._build.machine.name)]
        if self._keep_weights is not None:
            spare = self._tensor_bytes() - max(stage.plan.peak_bytes for stage in stages)
            kept = size_text(self._keep_weights(max(spare, 0)))
            lines.insert(-1, f"  weights that are kept gathered from one optimizer step to the next: {kept}")
        if dist.get_rank() == 0:
            logger().info("%s", "\n".join(lines))
        self._meter.peak()

    def _check_peak(self) -> None:
        """Warn once if a step has exceeded the budget: its batch may have more tokens than the recorded ones."""
        if self._build.device_type == CPU:
            return
        peak = int(torch.get_device_module(self._build.device_type).max_memory_allocated()) + self._buffer_bytes
        if peak > self.budget_gib * GIB:
            warn_once(
                f"{KEY}: a step needed {size_text(peak)}, more than {self.budget_gib:g} GiB. The plan is for batches "
                "as in the first two steps. What to do: let these have the most tokens, or pad all batches alike"
            )


def meter_of(engine: TrainingEngine, device_type: str) -> tuple[PeakMeter, Callable[[], None]]:
    """A meter of the peaks of ``engine``'s memory, and a function that stops it."""
    if device_type != CPU:
        return AllocatorMeter(device_type), lambda: None
    record = StorageRecord(CPU, lambda: "")
    record.see_all()
    undo = engine.events.around_calls(MethodLevel.PEAKS, lambda: record)

    def stop() -> None:
        record.close()
        for each in undo:
            each()

    return StorageMeter(record), stop


def gradient_buckets(engine: TrainingEngine) -> Buckets | None:
    """The buffers in which ZeRO collects gradients before it reduces them: their size does not depend on the model.

    None where the optimizer of ``engine`` has none (without ZeRO, or not contiguous), or ds_npu's, which are small.
    """
    stage = engine.zero_optimization_stage()
    optimizer = engine.optimizer
    if stage == 0 or not engine.zero_contiguous_gradients() or BUCKETED.get(optimizer) is not None:
        return None
    # DeepSpeed 0.19, stage_1_and_2.py setup_buckets and stage3.py _setup_for_real_optimizer.
    dtypes: list[torch.dtype] = list(optimizer.ipg_buckets)
    if stage < 3:
        dtypes = [optimizer._gradient_reduction_buffer_dtype()] * len(dtypes) * (2 if optimizer.overlap_comm else 1)
    elements = int(optimizer.reduce_bucket_size)
    shapes = (shape for module in engine.module.modules() for shape in own_shapes(module).values())
    largest = max(torch.Size(shape).numel() for shape in shapes)
    return Buckets(elements, sum(elements * each.itemsize for each in dtypes), largest)


def _joined(layers: Sequence[PlannedLayer]) -> PlannedLayer:
    """One layer on several ranks: the options that all ranks have, with the most bytes and seconds of any rank."""
    options = [{option.parts: option for option in layer.options} for layer in layers]
    shared = [parts for parts in options[0] if all(parts in each for each in options)]
    return PlannedLayer(
        layers[0].name,
        tuple(
            Option(
                parts,
                max(each[parts].kept_bytes for each in options),
                max(each[parts].seconds for each in options),
                max(each[parts].rest_bytes for each in options),
                max(each[parts].backward_bytes for each in options),
            )
            for parts in shared
        ),
        min(layer.forward_seconds for layer in layers),
    )
