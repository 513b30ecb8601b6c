"""An engine under construction, and the features that read and change it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Generic, TypeVar

import torch
from torch import nn

from ds_npu.config.problems import Config
from ds_npu.features.declaration import Change, Declaration, Phase
from ds_npu.models.globs import partial_plan_for, plan_for
from ds_npu.models.plan import ModelPlan, PlanError
from ds_npu.parallel.pipeline.pass_through import stages_in
from ds_npu.parallel.pipeline.schedule import Schedule
from ds_npu.parallel.runtime.marks import Mark
from ds_npu.parallel.tensor.axis import ChoosesCollectives
from ds_npu.parallel.tensor.randomness import align_generators
from ds_npu.planner.memory_plan_table import PlannedKeys
from ds_npu.topology.degrees import Axis
from ds_npu.topology.machine import Machine, machine_of
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.training_engine import TrainingEngine

V = TypeVar("V")

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
    ds_config: Config = field(default_factory=dict)
    """The DeepSpeed config, as its file has it."""
    when_built: list[Callable[[TrainingEngine], list[str]]] = field(default_factory=list)
    """Functions that are called with the built DeepSpeed engine and return lines for people."""
    is_pipeline: bool = False
    """Whether the model is a deepspeed.PipelineModule, which has a schedule of its own."""
    waiting_forwards: tuple[int, ...] = ()
    """The most forwards that wait for their backward at a time, per pipeline rank; empty without a schedule."""
    schedule: Callable[[int], tuple[str, Schedule]] | None = None
    """The name of the pipeline's schedule, and its actions for a number of samples, or of DeepSpeed's micro-batches."""
    collectives: ChoosesCollectives | None = None
    """Chooses how products overlap with sequence parallelism's collectives; None: no overlap."""
    sequence_parallel: bool = False
    """Whether tensor ranks hold different tokens between their regions."""
    notes: list[str] = field(default_factory=list)
    """Lines for the log, from features that declare."""
    declared: list[Declaration] = field(default_factory=list)
    """Changes that features have made, in the order of application."""
    makes_plans: bool = False
    """Whether a feature plans changes of the model while it trains."""
    planned: PlannedKeys | None = None
    """Keys that a plan has chosen in training; None once the driver has changed the model by them."""
    is_planned: bool = False
    """Whether the engine is only planned, without ranks and weights."""
    probes: bool = True
    """Whether blocks are tried at start: ``ds_npu.parallel.probe``."""

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

    @cached_property
    def machine(self) -> Machine:
        """The machine whose speeds estimates assume: this process's NPU, or an A2 without one."""
        has_device = self.device_type != "cpu" and not self.is_planned
        return machine_of(torch.get_device_module(self.device_type).get_device_name() if has_device else "")

    def installed(self, part: str, what: str, install: Callable[[TrainingEngine], list[str]]) -> Change:
        """The change that provides the engine's ``part``: calls ``install`` once DeepSpeed has built the engine."""
        return Change("provides", part, what, partial(self.when_built.append, install))

    def same_random_numbers(self, axis: Axis, ranks: str) -> Change:
        """Align random generators over ``axis``: scripts must draw the same on ranks that share samples."""
        make = partial(align_generators, self.topology, self.device_type, axis)
        return Change("provides", f"random generators over {axis}", f"states of the first {ranks} rank", make)

    def forget_plan(self) -> None:
        """Drop the cached plans: the model has another one now."""
        for known in ("plan", "partial_plan", "block_plan"):
            vars(self).pop(known, None)

    @property
    def is_cut_into_stages(self) -> bool:
        """Whether each rank along pp holds its own layers: the model is a PipelineModule, or was cut into stages.

        Raises ValueError where the model is not the stage that this rank is.
        """
        own, topology = stages_in(self.model), self.topology
        ranks = topology.size("pp")
        rank = topology.rank("pp")
        if own and (own[0].count != len(own) * ranks or (len(own) == 1 and own[0].index != rank)):
            raise ValueError(
                f"{type(self.model).__name__} is {' and '.join(map(str, own))}, and this is rank {rank} of the "
                f"{ranks} of ds_npu.parallel.pipeline"
            )
        return self.is_pipeline or bool(own)

    @property
    def shards_sequences(self) -> bool:
        """Whether the sequences of the model are to be sharded over context ranks."""
        return self.topology.size("cp") > 1 and not self.is_pipeline


@dataclass(frozen=True)
class Feature(Generic[V]):
    """One key of the ``"ds_npu"`` section, whose value is a V (a Section, or a plain value)."""

    key: str
    phase: Phase = Phase.ENGINE
    declare: Callable[[V, Build], Iterable[Change]] = lambda value, build: ()
    """Declares the changes of the model, without making them.

    There are none where the feature is off. Raises where the feature cannot do its part.
    """
    parts: Callable[[V, Build], Iterable[Change]] = lambda value, build: ()
    """Declares the parts that the feature provides for each engine, also where an earlier one changed the model."""
    asked: Callable[[V, Build], str] = lambda value, build: ""
    """Describes the value, if the feature can change a model only once; else empty."""
    without_plan: Callable[[Build], str] = lambda build: ""
    """Says in words whether the feature works for a model without a plan."""
    unmet: Callable[[V], list[str]] = lambda value: []
    """Tells why this machine cannot do what the value needs; empty where it can."""
