"""An engine under construction, which features read and change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from ds_npu.models.attributes import attribute, set_attribute
from ds_npu.models.globs import partial_plan_for, plan_for
from ds_npu.models.plan import ModelPlan
from ds_npu.parallel.tensor.axis import MatmulCollectives
from ds_npu.topology.topology import Topology

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
    when_built: list[Callable[[Any], list[str]]] = field(default_factory=list)
    """Functions that are called with the built DeepSpeed engine and return lines for people."""
    is_pipeline: bool = False
    """Whether the model is a deepspeed.PipelineModule, of which this rank holds some layers."""
    collectives: MatmulCollectives | None = None
    """The products that overlap with sequence parallelism's collectives; None: one after the other."""
    said: list[str] = field(default_factory=list)
    """Lines for people, from features that declare."""
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
        return known

    @cached_property
    def partial_plan(self) -> ModelPlan:
        """The plan as far as it is known: enough where no weights are sharded. Raises PlanError for wrong globs."""
        known = attribute(self.model, PLAN_ATTRIBUTE, ModelPlan)
        return partial_plan_for(self.model, self.globs) if known is None else known

    @property
    def shards_sequences(self) -> bool:
        """Whether the sequences of the model are to be sharded over context ranks."""
        return self.topology.size("cp") > 1 and not self.is_pipeline
