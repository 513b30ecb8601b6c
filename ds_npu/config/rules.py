"""Demands of the section's keys on each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from ds_npu.config.context_parallel import wrong_factors
from ds_npu.config.moe import MoeSection, able
from ds_npu.config.pipeline import MOST_STAGES, PAIRED
from ds_npu.config.problems import Problem
from ds_npu.config.sections import PLANNED, DsNpuConfig, switched_on

NEEDS_RANKS = {
    "parallel.sequence_parallel": "tensor",
    "context_parallel": "context",
    "pipeline": "pipeline",
    "pipeline.overlap_experts": "expert",
    "moe.placement_interval": "expert",
    "moe.replica_rows": "expert",
    "moe.row_margin": "expert",
}
"""Keys (or whole sections) that mean something only where an axis of ``parallel`` has more than one rank."""


@dataclass(frozen=True)
class Rule:
    """A demand on the keys at ``reads``."""

    reads: tuple[str, ...]
    problems: Callable[[DsNpuConfig], Iterator[Problem]]


def broken_rules(config: DsNpuConfig, doubtful: frozenset[str]) -> Iterator[Problem]:
    """Keys that contradict each other; a rule that reads a ``doubtful`` key says nothing."""
    for rule in RULES:
        if doubtful.isdisjoint(rule.reads):
            yield from rule.problems(config)


def _asked(config: DsNpuConfig, keys: tuple[str, ...], accepted: str) -> Iterator[Problem]:
    """Refuse each of ``keys`` that is switched on; of one that is a section, each key in it."""
    for path, value in switched_on(config):
        if f"{path}.".startswith(tuple(f"{key}." for key in keys)):
            yield Problem(f"ds_npu.{path}", value, accepted)


def _axis_rule(key: str, axis: str) -> Rule:
    def problems(config: DsNpuConfig) -> Iterator[Problem]:
        if dict(config.axes)[axis] == 1:
            yield from _asked(config, (key,), f"only with ds_npu.parallel.{axis} > 1")

    return Rule((f"parallel.{axis}", *(("parallel.tensor", "moe") if axis == "expert" else ())), problems)


def _refused(
    path: str,
    reads: tuple[str, ...],
    when: Callable[[DsNpuConfig], object],
    accepted: Callable[[DsNpuConfig], str] | str,
) -> Rule:
    """Refuse the value at ``path`` where ``when`` holds; ``accepted`` says which values would do."""

    def problems(config: DsNpuConfig) -> Iterator[Problem]:
        if when(config):
            yield Problem(
                f"ds_npu.{path}",
                attrgetter(path)(config),
                accepted if isinstance(accepted, str) else accepted(config),
            )

    return Rule(reads, problems)


def _context(config: DsNpuConfig) -> Iterator[Problem]:
    # NEEDS_RANKS reports a context axis of one rank.
    if config.parallel.context > 1:
        yield from wrong_factors(config.context_parallel, config.parallel.context)


def _computed_experts(config: DsNpuConfig) -> Iterator[Problem]:
    moe, parallel = config.moe, config.axes
    if parallel.expert * parallel.expert_tensor > 1:
        if moe.grouped_matmul is False:
            yield Problem(
                "ds_npu.moe.grouped_matmul",
                False,
                "true or left out: experts on ranks of ds_npu.parallel.expert are always computed so",
            )
        return
    accepted = "only with ds_npu.parallel.expert or expert_tensor > 1"
    if moe.dispatcher is not None:
        yield Problem("ds_npu.moe.dispatcher", moe.dispatcher, accepted)
    if moe.overlap:
        yield Problem("ds_npu.moe.overlap", True, accepted)
    if moe.computes and parallel.tensor > 1:
        asked = {path.removeprefix("moe."): value for path, value in switched_on(config) if path.startswith("moe.")}
        key = next(each for each in ("grouped_matmul", "zero_memory", "capacity_factor") if each in asked)
        yield Problem(f"ds_npu.moe.{key}", dict(moe)[key], f"{accepted}, where ds_npu.parallel.tensor is > 1")


def _capacity(config: DsNpuConfig) -> Iterator[Problem]:
    moe = config.moe
    if moe.capacity_factor is None:
        for key, value in (("capacity_policy", moe.capacity_policy), ("pad_to_capacity", moe.pad_to_capacity)):
            if value not in ("probs", False):
                yield Problem(f"ds_npu.moe.{key}", value, "only with ds_npu.moe.capacity_factor")
    elif moe.pad_to_capacity and moe.dispatching.padded is None:
        yield Problem(
            "ds_npu.moe.dispatcher",
            moe.dispatcher,
            f"{able(lambda each: each.padded)} or left out with ds_npu.moe.pad_to_capacity: padded rows go to "
            "their expert's ranks only",
        )


def _dispatcher(config: DsNpuConfig) -> Iterator[Problem]:
    moe, can = config.moe, config.moe.dispatching
    why = f"with ds_npu.moe.dispatcher {moe.dispatcher!r}{can.why}"
    for name, works in (("overlap", can.overlaps), ("zero_memory", can.recomputes), ("replica_rows", can.replicates)):
        found = dict(moe)[name]
        default = MoeSection.model_fields[name].default
        if not works and found != default:
            off = "false" if default is False else repr(default)
            yield Problem(f"ds_npu.moe.{name}", found, f"{off} {why}")
    if not can.shards_experts and config.axes.expert_tensor > 1:
        yield Problem("ds_npu.parallel.expert_tensor", config.axes.expert_tensor, f"1 {why}: they take whole experts")


def _row_margin(config: DsNpuConfig) -> Iterator[Problem]:
    moe, key = config.moe, "ds_npu.moe.row_margin"
    if moe.row_margin is None:
        return
    if moe.row_margin < 1:
        yield Problem(key, moe.row_margin, "a number >= 1: buffers have to hold what earlier forwards needed")
    if not moe.dispatching.presizes:
        yield Problem(key, moe.row_margin, f"left out with ds_npu.moe.dispatcher {moe.dispatcher!r}")
    for name in ("pad_to_capacity", "replica_rows", "placement_interval"):
        if dict(moe)[name]:
            yield Problem(key, moe.row_margin, f"left out with ds_npu.moe.{name} {dict(moe)[name]}")
    if config.parallel.pipeline > 1:
        yield Problem(
            key,
            moe.row_margin,
            f"left out with ds_npu.parallel.pipeline {config.parallel.pipeline}: stages do not run again",
        )


def _blocks(config: DsNpuConfig) -> Iterator[Problem]:
    """Refuse 8-bit moments where ranks hold copies of a weight, whose neighbours in a block differ by rank."""
    sharing = [axis for axis in ("tensor", "pipeline", "expert_tensor") if dict(config.parallel)[axis] > 1]
    if config.optimizer_memory.moments == "int8" and sharing:
        yield Problem(
            "ds_npu.optimizer_memory.moments",
            "int8",
            f"'fp32' or 'bf16' with ds_npu.parallel.{sharing[0]} > 1: blocks of 8 bits differ between its ranks",
        )


def _planned_as_well(config: DsNpuConfig) -> Iterator[Problem]:
    """Refuse keys that the plan for a budget decides itself, or does not take into account."""
    if config.recompute.budget_gib is not None:
        keys = ("swap", "pipeline.recompute", "moe.zero_memory")
        recompute = (f"recompute.{key}" for key, _ in config.recompute if key != "budget_gib")
        accepted = "nothing beside ds_npu.recompute.budget_gib, which chooses what is kept"
        yield from _asked(config, (*recompute, *keys), accepted)


def _recomputed_twice(config: DsNpuConfig) -> Iterator[Problem]:
    if config.pipeline.recompute is not None:
        accepted = "nothing beside ds_npu.pipeline.recompute: layers would be computed twice again"
        yield from _asked(config, ("recompute.layers", "recompute.modules"), accepted)


def _pairs(config: DsNpuConfig) -> Iterator[Problem]:
    """Refuse keys that do not work where a forward and a backward run together."""
    if not config.pipeline.overlap_experts:
        return
    why = "with ds_npu.pipeline.overlap_experts"
    schedule = config.pipeline.schedule
    if schedule is not None and schedule not in PAIRED:
        own = "; a file has pairs of its own, as (0F2;0B1)OVERLAP_F_B, and goes without the key"
        yield Problem(
            "ds_npu.pipeline.schedule", schedule, f"{', '.join(PAIRED)} {why}{own if schedule.endswith('.csv') else ''}"
        )
    if not config.moe.dispatching.overlaps:
        yield Problem(
            "ds_npu.moe.dispatcher",
            config.moe.dispatcher,
            f"{able(lambda each: each.overlaps)} {why}, which leaves it no message",
        )
    keys = ("pipeline.recompute", "recompute.budget_gib", "swap.activations")
    yield from _asked(config, keys, f"left out {why}: they know one forward or backward at a time")


def _vector_cores(config: DsNpuConfig) -> Iterator[Problem]:
    """Refuse ``aiv`` for several communicators, and with deterministic algorithms.

    HCCL can do neither.
    """
    modes = config.hccl.op_expansion_mode
    found = {name: mode for name, mode in modes.items() if mode == "aiv"}
    if len(found) > 1:
        yield Problem("ds_npu.hccl.op_expansion_mode", found, "'aiv' for one communicator: HCCL has no more at a time")
    if found and config.deterministic:
        accepted = "no 'aiv' with ds_npu.deterministic, under which HCCL ignores it"
        yield Problem("ds_npu.hccl.op_expansion_mode", found, accepted)


def _dump(config: DsNpuConfig) -> Iterator[Problem]:
    if not config.dump.steps:
        yield from _asked(config, ("dump",), "only with ds_npu.dump.steps, which says which steps are dumped")
        return
    yield from _asked(config, ("optimizer_memory",), "left out with ds_npu.dump, which reads masters and moments whole")
    moved = "left out with ds_npu.dump, whose records do not follow experts to other ranks"
    yield from _asked(config, ("moe.placement_interval",), moved)


MOST_PROFILED = 100
"""Steps of a profile: traces of more fill disks, and nobody reads them."""


def _profile(config: DsNpuConfig) -> Iterator[Problem]:
    steps = config.profile.steps
    if not steps:
        yield from _asked(config, ("profile",), "only with ds_npu.profile.steps, the first and the last step")
        return
    if len(steps) != 2 or not 0 <= steps[1] - steps[0] < MOST_PROFILED:
        accepted = f"the first and the last step, as [10, 12], at most {MOST_PROFILED} steps"
        yield Problem("ds_npu.profile.steps", steps, accepted)
        return
    first, last = steps
    # These count or record in the second step.
    for key, value in (("watch.mfu", config.watch.mfu), ("memory_report", config.memory_report)):
        if value and first <= 1 <= last:
            yield Problem("ds_npu.profile.steps", steps, f"without step 1, which ds_npu.{key} makes slower")
    if dumped := sorted(step for step in set(config.dump.steps) if first <= step <= last):
        yield Problem("ds_npu.profile.steps", steps, f"without {dumped}, which ds_npu.dump.steps makes slower")


RULES = (
    *(_axis_rule(key, axis) for key, axis in NEEDS_RANKS.items()),
    Rule(
        ("parallel.context", "context_parallel.algorithm", "context_parallel.ulysses", "context_parallel.window"),
        _context,
    ),
    _refused(
        "fused_ops.flash_attention",
        ("parallel.context", "fused_ops.flash_attention"),
        lambda section: section.fused_ops.flash_attention is False and section.parallel.context > 1,
        lambda section: (
            f"true or left out: with ds_npu.parallel.context {section.parallel.context} no rank has the whole "
            "sequence, and only ds_npu's attention goes over it"
        ),
    ),
    _refused(
        "tensor_overlap",
        ("parallel.tensor", "tensor_overlap"),
        lambda section: section.tensor_overlap not in (None, "none") and section.parallel.tensor == 1,
        "only with ds_npu.parallel.tensor > 1",
    ),
    _refused(
        "tensor_overlap",
        ("parallel.tensor", "parallel.sequence_parallel", "tensor_overlap"),
        lambda section: (
            section.tensor_overlap not in (None, "none")
            and section.parallel.tensor > 1
            and not section.parallel.sequence_parallel
        ),
        "'none', or ds_npu.parallel.sequence_parallel true: what overlaps are its gathers and scatters",
    ),
    _refused(
        "pipeline.virtual_stages",
        ("pipeline.schedule", "pipeline.virtual_stages"),
        lambda section: section.pipeline.virtual_stages > MOST_STAGES.get(section.pipeline.schedule or "", math.inf),
        lambda section: (
            f"at most {MOST_STAGES[str(section.pipeline.schedule)]} with ds_npu.pipeline.schedule "
            f"{section.pipeline.schedule!r}"
        ),
    ),
    _refused(
        "pipeline.noop_layers",
        ("pipeline.split", "pipeline.noop_layers"),
        lambda section: section.pipeline.split and section.pipeline.noop_layers,
        "nothing beside ds_npu.pipeline.split",
    ),
    _refused(
        "moe.tp_extends_ep",
        ("parallel.expert_tensor", "moe.tp_extends_ep"),
        lambda section: section.moe.tp_extends_ep and section.parallel.expert_tensor > 1,
        lambda section: f"false, or ds_npu.parallel.expert_tensor 1 in place of {section.parallel.expert_tensor}",
    ),
    Rule(("parallel.tensor", "parallel.expert", "parallel.expert_tensor", "moe"), _computed_experts),
    _refused(
        "moe.placement_interval",
        ("parallel.pipeline", "moe.placement_interval"),
        lambda section: section.moe.placement_interval and section.parallel.pipeline > 1,
        lambda section: f"0 with ds_npu.parallel.pipeline {section.parallel.pipeline}: stages do not relocate together",
    ),
    Rule(("moe",), _capacity),
    _refused(
        "moe.replica_rows",
        ("moe",),
        lambda section: section.moe.replica_rows and section.moe.pad_to_capacity,
        "0 with ds_npu.moe.pad_to_capacity: all experts have equally many rows",
    ),
    Rule(("moe", "parallel.pipeline"), _row_margin),
    Rule(("moe", "parallel.expert_tensor"), _dispatcher),
    _refused(
        "moe.aux_loss.over",
        ("moe",),
        lambda section: section.moe.aux_loss.coefficient is None and section.moe.aux_loss.over != "micro_batch",
        "only with ds_npu.moe.aux_loss.coefficient",
    ),
    _refused(
        "moe.load_report",
        ("moe",),
        lambda section: section.moe.load_report is not None and not section.moe.load_report.endswith(".svg"),
        "the name of an SVG file, which ends in .svg",
    ),
    _refused(
        "recompute.layers",
        ("recompute",),
        lambda section: isinstance(section.recompute.layers, int) and section.recompute.method is None,
        "'all', or ds_npu.recompute.method beside a number",
    ),
    _refused(
        "recompute.method",
        ("recompute",),
        lambda section: section.recompute.method is not None and not isinstance(section.recompute.layers, int),
        "only with a number at ds_npu.recompute.layers",
    ),
    _refused(
        "recompute.keep",
        ("recompute",),
        lambda section: (
            section.recompute.keep
            and section.recompute.layers == "none"
            and not section.recompute.modules
            and section.recompute.budget_gib is None
        ),
        "only with ds_npu.recompute.layers or ds_npu.recompute.modules, of which it keeps a part",
    ),
    _refused(
        "swap.hidden_only",
        ("swap",),
        lambda section: section.swap.hidden_only and not section.swap.activations,
        "only with ds_npu.swap.activations, of which it chooses a part",
    ),
    _refused(
        "swap.depth",
        ("swap",),
        lambda section: section.swap.depth is not None and not section.swap.activations,
        "only with ds_npu.swap.activations",
    ),
    _refused(
        "swap.compress",
        ("swap",),
        lambda section: section.swap.compress and not section.swap.activations,
        "only with ds_npu.swap.activations, whose copies it makes smaller",
    ),
    Rule(("recompute", "swap", "pipeline.recompute", "moe.zero_memory"), _planned_as_well),
    _refused(
        "chunked_loss",
        ("chunked_loss", "recompute.budget_gib"),
        lambda section: section.chunked_loss == PLANNED and section.recompute.budget_gib is None,
        f"true or a number of tokens; {PLANNED!r} only with ds_npu.recompute.budget_gib, whose plan chooses it",
    ),
    _refused(
        "optimizer_memory.resident_gib",
        ("optimizer_memory",),
        lambda section: section.optimizer_memory.resident_gib and not section.optimizer_memory.swap,
        "only with ds_npu.optimizer_memory.swap",
    ),
    _refused(
        "checkpoint.peer_folder",
        ("checkpoint",),
        lambda section: (section.checkpoint.peer_folder is None) != (section.checkpoint.peer_copies is None),
        "a folder that all ranks see beside ds_npu.checkpoint.peer_copies, and only there",
    ),
    Rule(("parallel", "optimizer_memory"), _blocks),
    Rule(("recompute", "pipeline.recompute"), _recomputed_twice),
    Rule(("pipeline", "moe", "recompute", "swap"), _pairs),
    Rule(("hccl.op_expansion_mode", "deterministic"), _vector_cores),
    Rule(("dump", "optimizer_memory", "moe.placement_interval"), _dump),
    Rule(("profile", "dump.steps", "watch.mfu", "memory_report"), _profile),
)
