"""The schedule of a pipeline, and the blocks of a model in each of its stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from torch import nn

from ds_npu.config.pipeline import PipelineSection
from ds_npu.config.problems import ConfigError, Problem
from ds_npu.models.attributes import attribute
from ds_npu.models.hugging_face_model import hugging_face_model, setting
from ds_npu.models.plan import ModelPlan
from ds_npu.parallel.pipeline.fill import recomputed
from ds_npu.parallel.pipeline.schedule import Action, Kind, Schedule, ScheduleError, from_csv
from ds_npu.parallel.pipeline.schedules import PAIRED, SCHEDULES
from ds_npu.parallel.pipeline.timeline import Costs, check_schedule
from ds_npu.planner.stage_balance import counts_by_rank, even_counts

KEY = "ds_npu.pipeline"
DEFAULT = "1f1b"
WITH_FEWER = {"dualpipe_v": "zb_v"}
"""A schedule that needs several micro-batches -> one that does not, with the same stages on each rank."""
MOST_AHEAD = {"inline": 0, "bubble": 1}
"""How many recomputations, besides the next one, may wait for their backwards, for each value of ``recompute``."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class PipelineLayout:
    """A schedule for any number of micro-batches, and the ranks of its stages."""

    name: str
    ranks: int
    chunks: int
    """Stages of each rank."""
    make: Callable[[int], Schedule]
    """Makes the schedule for a number of micro-batches; raises ScheduleError where there is none."""
    sample: Schedule
    """A schedule with enough micro-batches that its stages do the same as those of a longer one."""
    recomputes: bool
    """Whether forwards run again before their backwards, where activations would be kept meanwhile."""

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(self.sample.rank_of[stage] for stage in range(self.sample.stages))

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Time of each stage's actions on one micro-batch, in units of F = I = W = R."""
        taken = [0.0] * self.stages
        for action in self.sample.actions():
            taken[action.stage] += Costs().of(action) / self.sample.micro_batches
        return tuple(taken)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are actions of their own."""
        return any(action.kind is Kind.BACKWARD_WEIGHT for action in self.sample.actions())

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    def own(self, rank: int) -> list[int]:
        """The stages of ``rank``, first to last."""
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]

    @property
    def last_rank(self) -> int:
        """The rank that computes the loss."""
        return self.rank_of[-1]

    def forwards(self, micro_batches: int) -> Schedule:
        """The schedule of an evaluation: a rank runs all micro-batches through one of its stages, then the next."""
        return _forwards(self.rank_of, micro_batches)


@lru_cache
def _forwards(rank_of: tuple[int, ...], micro_batches: int) -> Schedule:
    rows: list[list[Action]] = [[] for _ in range(1 + max(rank_of))]
    for stage, rank in enumerate(rank_of):
        rows[rank] += [Action(stage, Kind.FORWARD, index) for index in range(micro_batches)]
    return Schedule.of(rows)


def layout_of(section: PipelineSection, ranks: int) -> PipelineLayout:
    """The layout that ``section`` asks for; raises ConfigError for a file of a schedule that cannot run."""
    name = section.schedule or (DEFAULT if section.virtual_stages == 1 else "interleaved")
    if name not in SCHEDULES:
        return _layout_of_file(section, name, ranks)
    named = SCHEDULES[name]
    chunks = section.virtual_stages if named.chunks is None else named.chunks

    # Cached for each number: on many ranks some schedules take longer to make than a step may wait.
    @lru_cache
    def make(micro_batches: int) -> Schedule:
        if micro_batches < named.fewest_micro_batches(ranks):
            made = SCHEDULES[WITH_FEWER[name]].make(ranks, micro_batches, chunks)
        else:
            made = (PAIRED[name] if section.overlap_experts else named.make)(ranks, micro_batches, chunks)
        return _with_recomputation(section, made)

    sample = make(max(named.fewest_micro_batches(ranks), 2 * ranks))
    return PipelineLayout(name, ranks, chunks, make, sample, section.recompute is not None)


def _with_recomputation(section: PipelineSection, schedule: Schedule) -> Schedule:
    return schedule if section.recompute is None else recomputed(schedule, MOST_AHEAD[section.recompute])


def check_recomputed_once(model: nn.Module) -> None:
    """Raise ValueError where transformers' checkpointing is on in ``model``, whose schedule recomputes its forwards."""
    found = next((each for each in model.modules() if attribute(each, "gradient_checkpointing", bool)), None)
    if found is not None:
        raise ValueError(
            f"{KEY}.recompute, and gradient checkpointing of {type(found).__name__} is on: activations would be "
            "computed twice again. What to do: leave out gradient_checkpointing (of the Trainer, or "
            f"model.gradient_checkpointing_enable()), or {KEY}.recompute"
        )


def _layout_of_file(section: PipelineSection, name: str, ranks: int) -> PipelineLayout:
    path = f"{KEY}.schedule"
    try:
        found = from_csv(Path(name).read_text(encoding="utf-8"))
        check_schedule(found)
    except (OSError, UnicodeDecodeError, ScheduleError) as error:
        accepted = f"a file with a row of actions for each rank that can run: {error}"
        raise ConfigError([Problem(path, name, accepted)]) from error
    has_own = any(each.kind is Kind.RECOMPUTE for each in found.actions())
    if section.recompute is not None and (has_own or found.paired):
        why = "which has recomputations (R) of its own" if has_own else "in which forwards and backwards run together"
        accepted = f"nothing beside ds_npu.pipeline.schedule {name!r}, {why}"
        raise ConfigError([Problem(f"{KEY}.recompute", section.recompute, accepted)])
    found = _with_recomputation(section, found)
    chunks = {sum(rank == owner for owner in found.rank_of.values()) for rank in range(len(found.rows))}
    if len(found.rows) != ranks or len(chunks) != 1:
        accepted = f"{ranks} rows (ds_npu.parallel.pipeline) with equally many stages each; it has {len(found.rows)}"
        raise ConfigError([Problem(path, name, accepted)])

    def make(micro_batches: int) -> Schedule:
        if micro_batches != found.micro_batches:
            raise ScheduleError(
                f"{name} is a schedule of {found.micro_batches} micro-batches, and the batch has {micro_batches}. What "
                f"to do: {KEY}.micro_batches {found.micro_batches}, and batches of as many samples or a multiple"
            )
        return found

    return PipelineLayout(name, ranks, chunks.pop(), make, found, has_own or section.recompute is not None)


def blocks_of_stages(section: PipelineSection, model: nn.Module, plan: ModelPlan, layout: PipelineLayout) -> list[int]:
    """How many blocks each stage has: as ``section`` says, else by cost. Raises ConfigError where it cannot."""
    blocks, stages = len(plan.blocks), layout.stages
    if section.split:
        if len(section.split) != stages or sum(section.split) != blocks:
            accepted = f"{stages} numbers, for the stages, that add up to the {blocks} blocks of {plan.model}"
            raise ConfigError([Problem(f"{KEY}.split", section.split, accepted)])
        return list(section.split)
    if not blocks:
        accepted = f"1, since {plan.model} has no one stack of blocks; or each block with the role block in ds_npu.plan"
        raise ConfigError([Problem("ds_npu.parallel.pipeline", stages, accepted)])
    try:
        if section.noop_layers:
            return even_counts(blocks, stages, section.noop_layers)
        return counts_by_rank(costs(model, plan), layout.rank_of, layout.work, head_cost(model, plan))
    except ValueError as error:
        key = f"{KEY}.noop_layers" if section.noop_layers else "ds_npu.parallel.pipeline"
        value = section.noop_layers or stages
        raise ConfigError([Problem(key, value, f"a division of {plan.model} into stages; {error}")]) from error


def costs(model: nn.Module, plan: ModelPlan) -> Sequence[float]:
    """Elements of each block's matrices that a token is multiplied by: its FLOP, except for attention's scores."""
    used = _used_experts(model)
    found = []
    for block in plan.blocks:
        weights = model.get_submodule(block).named_parameters()
        found.append(
            sum((used if ".experts." in name else 1.0) * each.numel() for name, each in weights if each.dim() > 1)
        )
    return found


def head_cost(model: nn.Module, plan: ModelPlan) -> float:
    """Elements of the head's weights."""
    head = plan.head
    return 0.0 if head is None else float(sum(each.numel() for each in model.get_submodule(head).parameters()))


def _used_experts(model: nn.Module) -> float:
    """The fraction of a layer's experts that a token goes to; 1 where it is not known."""
    found = hugging_face_model(model)
    config = None if found is None else found.config.get_text_config()
    if config is None:
        return 1.0
    chosen = setting(config, "num_experts_per_tok", int)
    all_of_them = next(filter(None, (setting(config, key, int) for key in EXPERTS)), None)
    return chosen / all_of_them if chosen and all_of_them else 1.0
