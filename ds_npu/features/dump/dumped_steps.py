"""``ds_npu.dump``: the tensors of whole optimizer steps, which each rank writes for ``ds_npu compare``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from ds_npu.config.dump import DumpSection
from ds_npu.config.roles import Role
from ds_npu.dump_hooks import DumpError, DumpFile, border_modules, unwrapped_name
from ds_npu.features.build import Build, Feature
from ds_npu.features.declaration import Change
from ds_npu.features.dump.step_records import StepRecords, loss_scale, one_message
from ds_npu.log import logger
from ds_npu.models import names
from ds_npu.parallel.context.held_tokens import HELD_TOKENS
from ds_npu.topology.degrees import AXES
from ds_npu.zero_ext.method_wraps import MethodLevel
from ds_npu.zero_ext.training_engine import TrainingEngine, Undo
from ds_npu.zero_ext.weight_pieces import why_unread

BORDERS = (Role.EMBEDDING, Role.BLOCK, Role.ATTENTION, Role.MLP, Role.MOE, Role.NORM, Role.FINAL_NORM)
"""Roles of modules whose outputs are hidden states of whole width on every rank."""
KEY = "ds_npu.dump"


def _parts(section: DumpSection, build: Build) -> Iterable[Change]:
    if not section.steps:
        return
    if build.is_pipeline:
        raise ValueError(
            f"{KEY}: found with a deepspeed.PipelineModule, whose layers have no names of a whole model. What to do: "
            "leave it out, or give deepspeed.initialize the model itself, with ds_npu.parallel.pipeline"
        )
    borders = border_names(section, build)
    what = f"{section.what} of {len(borders)} modules' outputs and of weights in steps {_listed(section.steps)}"
    yield build.installed("a dump of tensors", what, partial(_install, section, build, borders))


def border_names(section: DumpSection, build: Build) -> list[str]:
    """The modules whose outputs are dumped; raises ValueError for a glob that matches none."""
    plan = build.block_plan
    found = [name for name in plan.named(*BORDERS) if plan.around(name, Role.EXPERTS) is None]
    if not plan.blocks and build.topology.size("tp") == 1:
        found = list(border_modules(build.model))
    for glob in section.modules:
        if not any(names.matches(glob, name) for name in found):
            raise ValueError(
                f"{KEY}.modules: {glob!r} matches no block, attention, MLP or norm of {type(build.model).__name__}"
                f"{names.suggestion(glob, found)}"
            )
    wanted = section.modules or ["**"]
    return [name for name in found if any(names.matches(each, name) for each in wanted)]


class Dumping:
    """Dumps the chosen steps of one engine."""

    def __init__(self, engine: TrainingEngine, section: DumpSection, records: StepRecords) -> None:
        self.engine, self.records = engine, records
        self.missing = sorted(set(section.steps))
        """Steps that have not been dumped."""
        self.undo: list[Undo] = []

    def stop(self) -> None:
        """Dump no further step."""
        self.missing.clear()

    @contextmanager
    def around_call(self) -> Iterator[None]:
        """Begin a step that is dumped at its first forward.

        After a backward, scale the recorded gradients of outputs.
        """
        records, engine = self.records, self.engine
        trains = engine.module.training and torch.is_grad_enabled()
        if engine.global_steps in self.missing and trains and not records.is_open:
            with one_message(records, self.stop):
                records.begin()
        yield
        factor = engine.factor_of_gradients() if records.is_open else None
        if factor is not None:
            records.scale_outputs(factor / (engine.topology.size("dp") * loss_scale(engine.optimizer)))

    def before_step(self) -> None:
        """Record the gradients of a step that is dumped."""
        if self.records.is_open:
            with one_message(self.records, self.stop):
                self.records.record_gradients()

    def after_step(self) -> None:
        """Write a step that is dumped."""
        if self.records.is_open:
            step = self.engine.global_steps - 1
            with one_message(self.records, self.stop):
                self.records.end(step)
            self.missing = [each for each in self.missing if each != step]

    def say_missing(self) -> None:
        """Say at the end of the run which steps never came."""
        # A reference model's engine has the same config, and never trains.
        if self.missing and self.engine.global_steps > 0 and self.records.file.header["rank"] == 0:
            steps = _listed(self.missing)
            ended = self.engine.global_steps
            logger().warning("%s.steps: %s never came: the run ended behind step %d", KEY, steps, ended - 1)


def _install(section: DumpSection, build: Build, borders: Sequence[str], engine: TrainingEngine) -> list[str]:
    topology = engine.topology
    if topology.size("cp") > 1 and not any(HELD_TOKENS.get(module) for module in engine.module.modules()):
        raise ValueError(
            f"{KEY}: found with ds_npu.parallel.context {topology.size('cp')} and a model that is given tokens of its "
            "own on each context rank: nothing says which. What to do: leave it out, or take a model of transformers"
        )
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in engine.module.parameters()})
    header = {
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "layout": {axis: topology.size(axis) for axis in AXES if topology.size(axis) > 1},
        "ranks": {axis: topology.rank(axis) for axis in AXES if topology.size(axis) > 1},
        "zero": engine.zero_optimization_stage(),
        "dtypes": dtypes,
        "what": section.what,
    }
    shards = topology.size("tp") if build.sequence_parallel else 1
    try:
        file = DumpFile(section.folder, header)
    except DumpError as error:
        raise ValueError(f"{KEY}.folder: {error}") from error
    records = StepRecords(engine, file, borders, shards)
    if section.modules:
        wanted = tuple(f"{unwrapped_name(name)}." for name in borders)
        records.weights = lambda name: name.startswith(wanted)
    dumping = Dumping(engine, section, records)
    events = engine.events
    events.around_calls(MethodLevel.DUMP, dumping.around_call)
    events.before_step(MethodLevel.DUMP, dumping.before_step)
    events.after_step(MethodLevel.DUMP, dumping.after_step)
    events.at_end(MethodLevel.DUMP, dumping.say_missing)
    return list(_announced(section, engine, borders))


def _announced(section: DumpSection, engine: TrainingEngine, borders: Sequence[str]) -> Iterator[str]:
    """Lines for people: how much is written, and what is not."""
    weights = list(engine.module.parameters())
    records = 5 * len(weights)
    size = 400 * records / 2**20
    of_forward = 600 * len(borders) / 2**10
    text = f"about {size:.1f} MiB for each rank, and {of_forward:.0f} KiB for each micro-batch"
    if section.what == "tensors":
        numbers = sum(weight.numel() * weight.element_size() for weight in weights)
        most = f"up to {5 * numbers / 2**30:.2f} GiB of weights, gradients and state"
        text += f", {most}, and {2 * len(borders)} hidden states of each micro-batch"
    yield f"dump: steps {_listed(section.steps)} go to {section.folder}: {text}"
    if reason := why_unread(engine.optimizer, [weight for weight in weights if weight.requires_grad]):
        yield f"dump: gradients and optimizer state are not recorded: {reason}"


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(set(steps))))


DUMP: Feature[DumpSection] = Feature("dump", parts=_parts)
