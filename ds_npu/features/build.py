"""An engine under construction, which features read and change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from ds_npu.features.declaration import Declaration
from ds_npu.models.attributes import attribute, set_attribute
from ds_npu.models.globs import partial_plan_for, plan_for
from ds_npu.models.plan import ModelPlan, PlanError
from ds_npu.parallel.pipeline.pass_through import stages_in
from ds_npu.parallel.tensor.axis import MatmulCollectives
from ds_npu.planner.memory_plan_table import PlannedKeys
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.training_engine import TrainingEngine

PLAN_ATTRIBUTE = "ds_npu_plan"
"""The attribute of a model that is its ModelPlan."""


@dataclass
class Build:
    """An engine under construction: features read and change it."""

    topology: Topology
    model: nn.Module
    """The user's model, which features change in place."""
    globs: Mapping[str, str] = field(default_factory=dict)
    """``ds_npu.plan``."""
    device_type: str = "cpu"
    """The type of the device that the model will be on."""
    when_built: list[Callable[[TrainingEngine], list[str]]] = field(default_factory=list)
    """Functions that are called with the built DeepSpeed engine and return lines for people."""
    is_pipeline: bool = False
    """Whether the model is a deepspeed.PipelineModule, which has a schedule of its own."""
    waiting_forwards: tuple[int, ...] = ()
    """By pipeline rank, the most forwards that wait for their backward at a time; none where no schedule says so."""
    collectives: MatmulCollectives | None = None
    """The products that overlap with sequence parallelism's collectives; None: one after the other."""
    sequence_parallel: bool = False
    """Whether tensor ranks hold different tokens between their regions."""
    said: list[str] = field(default_factory=list)
    """Lines for people, from features that declare."""
    declared: list[Declaration] = field(default_factory=list)
    """What features have changed, in the order of application."""
    makes_plans: bool = False
    """Whether something plans changes of the model while it trains."""
    planned: PlannedKeys | None = None
    """What a plan has chosen while the model trains, until the driver changes the model by it."""
    is_planned: bool = False
    """Whether the engine is planned only: no rank is there, and no weight."""

    @cached_property
    def plan(self) -> ModelPlan:
        """The plan of the model; raises PlanError where it is not known what a module is.

        The plan is an attribute of the model: modules that features have changed no longer show their roles.
        """
        known = attribute(self.model, PLAN_ATTRIBUTE, ModelPlan)
        if known is None:
            known = plan_for(self.model, self.globs)
            set_attribute(self.model, PLAN_ATTRIBUTE, known)
        if known.is_partial:
            plan_for(self.model, self.globs)
            raise PlanError(known.model, ["other pipeline stages hold modules of which nothing says what they are"])
        return known

    @cached_property
    def partial_plan(self) -> ModelPlan:
        """The plan as far as it is known: enough where no weights are sharded. Raises PlanError for wrong globs."""
        known = attribute(self.model, PLAN_ATTRIBUTE, ModelPlan)
        return partial_plan_for(self.model, self.globs) if known is None else known

    @cached_property
    def block_plan(self) -> ModelPlan:
        """The plan; where no weights are sharded and it is not known whole, what is known of it."""
        try:
            return self.plan
        except PlanError:
            if self.topology.size("tp") > 1:
                raise
            return self.partial_plan

    def forget_plan(self) -> None:
        """The model has another plan now: its attribute."""
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
