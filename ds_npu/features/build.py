"""An engine under construction: what features are given, and what they change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from torch import nn

from ds_npu.models.globs import partial_plan_for, plan_for
from ds_npu.models.plan import ModelPlan
from ds_npu.topology.topology import Topology

PLAN_ATTRIBUTE = "ds_npu_plan"
"""The attribute of a model that is its plan."""


class Slot(Enum):
    """A place in a build that one feature at most fills."""

    ATTENTION = "attention"
    LINEAR = "linear"
    NORM = "norm"
    ROPE = "rope"
    ACTIVATION = "activation"
    BLOCK_WRAPPER = "block_wrapper"
    OPTIMIZER = "optimizer"
    SCHEDULE = "schedule"
    GRAD_SYNC = "grad_sync"
    MOE_DISPATCH = "moe_dispatch"
    LOSS = "loss"


@dataclass
class Build:
    """An engine under construction: features fill its slots, the engine reads them."""

    topology: Topology
    model: nn.Module
    """The user's, which features change in place."""
    globs: Mapping[str, str] = field(default_factory=dict)
    """``ds_npu.plan``."""
    device_type: str = "cpu"
    """Where the model will be."""
    when_built: list[Callable[[Any], list[str]]] = field(default_factory=list)
    """What is done to the engine once it is built; returns lines for people."""
    is_pipeline: bool = False
    """Whether the model is a deepspeed.PipelineModule, of which this rank has some layers."""
    slots: dict[Slot, Any] = field(default_factory=dict)
    _owners: dict[Slot, str] = field(default_factory=dict)

    @cached_property
    def plan(self) -> ModelPlan:
        """Which module of the model is what; raises PlanError where that is not known.

        The model keeps its plan: once features have changed its modules, they no longer tell.
        """
        kept: dict[str, Any] = self.model.__dict__
        if PLAN_ATTRIBUTE not in kept:
            kept[PLAN_ATTRIBUTE] = plan_for(self.model, self.globs)
        found: ModelPlan = kept[PLAN_ATTRIBUTE]
        return found

    @cached_property
    def partial_plan(self) -> ModelPlan:
        """The plan, or as much of it as is known: for who shards no weights. Raises PlanError for wrong globs."""
        kept: ModelPlan | None = self.model.__dict__.get(PLAN_ATTRIBUTE)
        return partial_plan_for(self.model, self.globs) if kept is None else kept

    @property
    def shards_sequences(self) -> bool:
        """Whether the model's attentions are to work on parts of its sequences."""
        return self.topology.size("cp") > 1 and not self.is_pipeline

    def fill(self, slot: Slot, part: Any, by: str) -> None:
        """Put ``part`` into ``slot`` for the feature whose key is ``by``; raises ValueError if another one has it."""
        if slot in self._owners:
            raise ValueError(f"ds_npu.{self._owners[slot]} and ds_npu.{by} both set the {slot.value}; turn one off")
        self._owners[slot] = by
        self.slots[slot] = part
