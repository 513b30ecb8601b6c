"""What a feature is: a key of the section, what it needs of this machine, and what it does to a build."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field

V = TypeVar("V")

MOST_RANKS = 2**20
"""Of a world, and so along an axis."""

MOST_CONTEXT_RANKS = 2**10
"""Estimating what every algorithm costs so many takes seconds."""

Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
ContextRanks = Annotated[int, Field(ge=1, le=MOST_CONTEXT_RANKS)]
AtLeastOne = Annotated[int, Field(ge=1)]
AtLeastZero = Annotated[int, Field(ge=0)]


PLANNED = "ds_npu_plan"
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

    topology: Any
    """Who is where (``ds_npu.topology.topology.Topology``, which imports torch and so is not named here)."""
    model: Any = None
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
    def plan(self) -> Any:
        """Which module of the model is what (the ModelPlan); raises PlanError where that is not known.

        The model keeps its plan: once features have changed its modules, they no longer tell.
        """
        kept: dict[str, Any] = self.model.__dict__
        if PLANNED not in kept:
            # The check of a config, too, imports this module, and does without torch.
            kept[PLANNED] = importlib.import_module("ds_npu.models.globs").plan_for(self.model, self.globs)
        return kept[PLANNED]

    @cached_property
    def sketch(self) -> Any:
        """The plan, or as much of it as is known: for who splits no weights. Raises PlanError for wrong globs."""
        globs: Any = importlib.import_module("ds_npu.models.globs")
        kept = self.model.__dict__.get(PLANNED)
        return globs.sketch_for(self.model, self.globs) if kept is None else kept

    @property
    def spreads_sequences(self) -> bool:
        """Whether the model's attentions are to work on parts of its sequences."""
        return self.topology is not None and self.topology.size("cp") > 1 and not self.is_pipeline

    def fill(self, slot: Slot, part: Any, by: str) -> None:
        """Put ``part`` into ``slot`` for the feature whose key is ``by``; raises ValueError if another one has it."""
        if slot in self._owners:
            raise ValueError(f"ds_npu.{self._owners[slot]} and ds_npu.{by} both set the {slot.value}; turn one off")
        self._owners[slot] = by
        self.slots[slot] = part


def _needs_nothing(value: Any) -> list[str]:
    return []


def _does_nothing(value: Any, build: Build) -> None:
    return None


@dataclass(frozen=True)
class Feature(Generic[V]):
    """One key of the ``"ds_npu"`` section, whose value is a V (a Section, or a plain value)."""

    key: str
    planned: tuple[str, ...] = ()
    """Keys that are not built yet and hence refused; the name of a section stands for all of its keys."""
    unmet: Callable[[V], list[str]] = _needs_nothing
    """Why this machine cannot do what the value asks for; empty where it can."""
    apply: Callable[[V, Build], None] = _does_nothing
    """Does to the build what the value asks for; nothing where the value is off."""
