"""An engine under construction, which features read and change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from ds_npu.features.declaration import Declaration
from ds_npu.models.globs import partial_plan_for, plan_for
from ds_npu.models.plan import ModelPlan, PlanError
from ds_npu.parallel.pipeline.pass_through import stages_in
from ds_npu.parallel.runtime.marks import Mark
from ds_npu.parallel.tensor.axis import MatmulCollectives
from ds_npu.planner.memory_plan_table import PlannedKeys
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.training_engine import TrainingEngine

MODEL_PLAN: Mark[ModelPlan] = Mark("plan")
"""The plan of a model."""


@dataclass
class Build:
    """An engine under construction: features read and change it."""

    topology: Topology
    model: nn.Module
    """The user's model, which features change in place."""
    globs: Mapping[str, str] = field(default_factory=dict)
    """The value of ``ds_npu.plan``: a role for each glob."""
    device_type: str = "cpu"
    """The type of the device that the model will be on."""
    when_built: list[Callable[[TrainingEngine], list[str]]] = field(default_factory=list)
    """Functions that are called with the built DeepSpeed engine and return lines for people."""
    is_pipeline: bool = False
    """Whether the model is a deepspeed.PipelineModule, which has a schedule of its own."""
    waiting_forwards: tuple[int, ...] = ()
    """The most forwards that wait for their backward at a time, per pipeline rank; empty without a schedule."""
    collectives: MatmulCollectives | None = None
    """The products that overlap with sequence parallelism's collectives; None: no overlap."""
    sequence_parallel: bool = False
    """Whether tensor ranks hold different tokens between their regions."""
    notes: list[str] = field(default_factory=list)
    """Lines for the log, from features that declare."""
    declared: list[Declaration] = field(default_factory=list)
    """Changes that features have made, in the order of application."""
    makes_plans: bool = False
    """Whether something plans changes of the model while it trains."""
    planned: PlannedKeys | None = None
    """Keys that a plan has chosen in training; None once the driver has changed the model by them."""
    is_planned: bool = False
    """Whether the engine is only planned, without ranks and weights."""

    @cached_property
    def plan(self) -> ModelPlan:
        """The plan of the model; raises PlanError where it is not known what a module is.

        The model has the plan: modules that features have changed no longer show their roles.
        """
        known = MODEL_PLAN.get(self.model)
        if known is None:
            known = plan_for(self.model, self.globs)
            MODEL_PLAN.set(self.model, known)
        if known.is_partial:
            plan_for(self.model, self.globs)
            raise PlanError(known.model, ["other pipeline stages hold modules of which nothing says what they are"])
        return known

    @cached_property
    def partial_plan(self) -> ModelPlan:
        """The known part of the plan: enough where no weights are sharded. Raises PlanError for wrong globs."""
        known = MODEL_PLAN.get(self.model)
        return partial_plan_for(self.model, self.globs) if known is None else known

    @cached_property
    def block_plan(self) -> ModelPlan:
        """The plan; its known part where it is not known whole and no weights are sharded."""
        try:
            return self.plan
        except PlanError:
            if self.topology.size("tp") > 1:
                raise
            return self.partial_plan

    def forget_plan(self) -> None:
        """Drop the cached plans: the model has another one now."""
        for known in ("plan", "partial_plan", "block_plan"):
            vars(self).pop(known, None)

    @property
    def is_cut_into_stages(self) -> bool:
        """Whether the ranks along pp hold other layers: a PipelineModule's, or those that ``cut_into_stages`` left.

        Raises ValueError where the model is not the stage that this rank is.
        """
        own, topology = stages_in(self.model), self.topology
        ranks, rank = topology.size("pp"), topology.rank("pp")
        fits = not own or (own[0].count == len(own) * ranks and (len(own) > 1 or own[0].index == rank))
        if not fits:
            raise ValueError(
                f"{type(self.model).__name__} is {' and '.join(map(str, own))}, and this is rank {rank} of the "
                f"{ranks} of ds_npu.parallel.pipeline"
            )
        return self.is_pipeline or bool(own)

    @property
    def shards_sequences(self) -> bool:
        """Whether the sequences of the model are to be sharded over context ranks."""
        return self.topology.size("cp") > 1 and not self.is_pipeline
