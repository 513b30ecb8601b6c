"""What the keys of the section demand of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ds_npu.config.chunked_loss import PLANNED
from ds_npu.config.context_parallel import wrong_factors
from ds_npu.config.moe import MoeSection, able
from ds_npu.config.pipeline import PAIRED, too_many_stages, two_divisions
from ds_npu.config.problems import Problem
from ds_npu.config.sections import DsNpuConfig, switched_on

NEEDS_RANKS = {
    "parallel.sequence_parallel": "tensor",
    "tensor_overlap": "tensor",
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


def _axis_rule(key: str, axis: str) -> Rule:
    def problems(config: DsNpuConfig) -> Iterator[Problem]:
        if dict(config.axes)[axis] == 1:
            for path, value in switched_on(config):
                if path == key or path.startswith(f"{key}."):
                    yield Problem(f"ds_npu.{path}", value, f"only with ds_npu.parallel.{axis} > 1")

    return Rule((f"parallel.{axis}", *(("parallel.tensor", "moe") if axis == "expert" else ())), problems)


def _context(config: DsNpuConfig) -> Iterator[Problem]:
    # A context axis of one rank is said by NEEDS_RANKS.
    if config.parallel.context > 1:
        yield from wrong_factors(config.context_parallel, config.parallel.context)


def _own_attention(config: DsNpuConfig) -> Iterator[Problem]:
    if config.fused_ops.flash_attention is False and config.parallel.context > 1:
        accepted = (
            f"true or left out: with ds_npu.parallel.context {config.parallel.context} no rank has the whole sequence, "
            "and only ds_npu's attention goes over it"
        )
        yield Problem("ds_npu.fused_ops.flash_attention", False, accepted)


def _overlap(config: DsNpuConfig) -> Iterator[Problem]:
    if config.tensor_overlap != "none" and config.parallel.tensor > 1 and not config.parallel.sequence_parallel:
        accepted = "'none', or ds_npu.parallel.sequence_parallel true: what overlaps are its gathers and scatters"
        yield Problem("ds_npu.tensor_overlap", config.tensor_overlap, accepted)


def _virtual_stages(config: DsNpuConfig) -> Iterator[Problem]:
    return too_many_stages(config.pipeline)


def _whole_experts(config: DsNpuConfig) -> Iterator[Problem]:
    if config.moe.tp_extends_ep and config.parallel.expert_tensor > 1:
        accepted = f"false, or ds_npu.parallel.expert_tensor 1 in place of {config.parallel.expert_tensor}"
        yield Problem("ds_npu.moe.tp_extends_ep", True, accepted)


def _computed_experts(config: DsNpuConfig) -> Iterator[Problem]:
    moe, parallel = config.moe, config.axes
    if parallel.expert * parallel.expert_tensor > 1:
        if moe.grouped_matmul is False:
            accepted = "true or left out: experts on ranks of ds_npu.parallel.expert are always computed so"
            yield Problem("ds_npu.moe.grouped_matmul", False, accepted)
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


def _divisions(config: DsNpuConfig) -> Iterator[Problem]:
    return two_divisions(config.pipeline)


def _relocation(config: DsNpuConfig) -> Iterator[Problem]:
    if (interval := config.moe.placement_interval) and config.parallel.pipeline > 1:
        accepted = f"0 with ds_npu.parallel.pipeline {config.parallel.pipeline}: stages do not relocate together"
        yield Problem("ds_npu.moe.placement_interval", interval, accepted)


def _capacity(config: DsNpuConfig) -> Iterator[Problem]:
    moe = config.moe
    if moe.capacity_factor is None:
        for key, value in (("capacity_policy", moe.capacity_policy), ("pad_to_capacity", moe.pad_to_capacity)):
            if value not in ("probs", False):
                yield Problem(f"ds_npu.moe.{key}", value, "only with ds_npu.moe.capacity_factor")
    elif moe.pad_to_capacity and moe.dispatching.padded is None:
        why = "or left out with ds_npu.moe.pad_to_capacity: padded rows go to their expert's ranks only"
        accepted = f"{able('padded')} {why}"
        yield Problem("ds_npu.moe.dispatcher", moe.dispatcher, accepted)


def _replicas(config: DsNpuConfig) -> Iterator[Problem]:
    if config.moe.replica_rows and config.moe.pad_to_capacity:
        accepted = "0 with ds_npu.moe.pad_to_capacity: all experts have equally many rows"
        yield Problem("ds_npu.moe.replica_rows", config.moe.replica_rows, accepted)


def _dispatcher(config: DsNpuConfig) -> Iterator[Problem]:
    moe, can = config.moe, config.moe.dispatching
    why = f"with ds_npu.moe.dispatcher {moe.dispatcher!r}{can.why}"
    keys = (("overlap", can.overlaps), ("zero_memory", can.recomputes), ("replica_rows", can.replicates))
    for name, works in keys:
        found, default = dict(moe)[name], MoeSection.model_fields[name].default
        if not works and found != default:
            off = "false" if default is False else repr(default)
            yield Problem(f"ds_npu.moe.{name}", found, f"{off} {why}")
    if not can.shards_experts and config.axes.expert_tensor > 1:
        accepted = f"1 {why}: they take whole experts"
        yield Problem("ds_npu.parallel.expert_tensor", config.axes.expert_tensor, accepted)


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
        accepted = f"left out with ds_npu.parallel.pipeline {config.parallel.pipeline}: stages do not run again"
        yield Problem(key, moe.row_margin, accepted)


def _balance(config: DsNpuConfig) -> Iterator[Problem]:
    aux = config.moe.aux_loss
    if aux.coefficient is None and aux.over != "micro_batch":
        yield Problem("ds_npu.moe.aux_loss.over", aux.over, "only with ds_npu.moe.aux_loss.coefficient")
    report = config.moe.load_report
    if report is not None and not report.endswith(".svg"):
        yield Problem("ds_npu.moe.load_report", report, "the name of an SVG file, which ends in .svg")


def _resident(config: DsNpuConfig) -> Iterator[Problem]:
    resident = config.optimizer_memory.resident_gib
    if resident and not config.optimizer_memory.swap:
        yield Problem("ds_npu.optimizer_memory.resident_gib", resident, "only with ds_npu.optimizer_memory.swap")


def _blocks(config: DsNpuConfig) -> Iterator[Problem]:
    """Weights that ranks hold alike stand beside others on each, and share a scale with them."""
    sharing = [axis for axis in ("tensor", "pipeline", "expert_tensor") if dict(config.parallel)[axis] > 1]
    if config.optimizer_memory.moments == "int8" and sharing:
        accepted = f"'fp32' or 'bf16' with ds_npu.parallel.{sharing[0]} > 1: blocks of 8 bits differ between its ranks"
        yield Problem("ds_npu.optimizer_memory.moments", "int8", accepted)


def _recompute(config: DsNpuConfig) -> Iterator[Problem]:
    recompute, counted = config.recompute, isinstance(config.recompute.layers, int)
    if counted and recompute.method is None:
        yield Problem("ds_npu.recompute.layers", recompute.layers, "'all', or ds_npu.recompute.method beside a number")
    if recompute.method is not None and not counted:
        accepted = "only with a number at ds_npu.recompute.layers"
        yield Problem("ds_npu.recompute.method", recompute.method, accepted)
    if recompute.keep and recompute.layers == "none" and not recompute.modules and recompute.budget_gib is None:
        accepted = "only with ds_npu.recompute.layers or ds_npu.recompute.modules, of which it keeps a part"
        yield Problem("ds_npu.recompute.keep", recompute.keep, accepted)


def _swap(config: DsNpuConfig) -> Iterator[Problem]:
    if config.swap.hidden_only and not config.swap.activations:
        yield Problem("ds_npu.swap.hidden_only", True, "only with ds_npu.swap.activations, of which it chooses a part")
    if config.swap.depth is not None and not config.swap.activations:
        yield Problem("ds_npu.swap.depth", config.swap.depth, "only with ds_npu.swap.activations")
    if config.swap.compress and not config.swap.activations:
        yield Problem("ds_npu.swap.compress", True, "only with ds_npu.swap.activations, whose copies it makes smaller")


def _planned_beside(config: DsNpuConfig) -> Iterator[Problem]:
    """What a plan for a budget decides itself, or does not see."""
    if config.recompute.budget_gib is None:
        return
    keys = ("recompute.", "swap.", "pipeline.recompute", "moe.zero_memory")
    for path, value in switched_on(config):
        if path.startswith(keys) and path != "recompute.budget_gib":
            accepted = "nothing beside ds_npu.recompute.budget_gib, which chooses what is kept"
            yield Problem(f"ds_npu.{path}", value, accepted)


def _planned_chunks(config: DsNpuConfig) -> Iterator[Problem]:
    if config.chunked_loss == PLANNED and config.recompute.budget_gib is None:
        accepted = (
            f"true or a number of tokens; {PLANNED!r} only with ds_npu.recompute.budget_gib, whose plan chooses it"
        )
        yield Problem("ds_npu.chunked_loss", config.chunked_loss, accepted)


def _recomputed_twice(config: DsNpuConfig) -> Iterator[Problem]:
    asked = {path: value for path, value in switched_on(config) if path in ("recompute.layers", "recompute.modules")}
    if config.pipeline.recompute is not None:
        accepted = "nothing beside ds_npu.pipeline.recompute: layers would be computed twice again"
        yield from (Problem(f"ds_npu.{path}", value, accepted) for path, value in asked.items())


def _pairs(config: DsNpuConfig) -> Iterator[Problem]:
    """What a forward and a backward that run together have no place for, or would confuse."""
    if not config.pipeline.overlap_experts:
        return
    why = "with ds_npu.pipeline.overlap_experts"
    schedule = config.pipeline.schedule
    if schedule is not None and schedule not in PAIRED:
        own = "; a file has pairs of its own, as (0F2;0B1)OVERLAP_F_B, and goes without the key"
        accepted = f"{', '.join(PAIRED)} {why}{own if schedule.endswith('.csv') else ''}"
        yield Problem("ds_npu.pipeline.schedule", schedule, accepted)
    if not config.moe.dispatching.overlaps:
        accepted = f"{able('overlaps')} {why}, which leaves it no message"
        yield Problem("ds_npu.moe.dispatcher", config.moe.dispatcher, accepted)
    for path, value in switched_on(config):
        if path in ("pipeline.recompute", "recompute.budget_gib", "swap.activations"):
            accepted = f"left out {why}: they know one forward or backward at a time"
            yield Problem(f"ds_npu.{path}", value, accepted)


RULES = (
    *(_axis_rule(key, axis) for key, axis in NEEDS_RANKS.items()),
    Rule(
        ("parallel.context", "context_parallel.algorithm", "context_parallel.ulysses", "context_parallel.window"),
        _context,
    ),
    Rule(("parallel.context", "fused_ops.flash_attention"), _own_attention),
    Rule(("parallel.tensor", "parallel.sequence_parallel", "tensor_overlap"), _overlap),
    Rule(("pipeline.schedule", "pipeline.virtual_stages"), _virtual_stages),
    Rule(("pipeline.split", "pipeline.noop_layers"), _divisions),
    Rule(("parallel.expert_tensor", "moe.tp_extends_ep"), _whole_experts),
    Rule(("parallel.tensor", "parallel.expert", "parallel.expert_tensor", "moe"), _computed_experts),
    Rule(("parallel.pipeline", "moe.placement_interval"), _relocation),
    Rule(("moe",), _capacity),
    Rule(("moe",), _replicas),
    Rule(("moe", "parallel.pipeline"), _row_margin),
    Rule(("moe", "parallel.expert_tensor"), _dispatcher),
    Rule(("moe",), _balance),
    Rule(("recompute",), _recompute),
    Rule(("swap",), _swap),
    Rule(("recompute", "swap", "pipeline.recompute", "moe.zero_memory"), _planned_beside),
    Rule(("chunked_loss", "recompute.budget_gib"), _planned_chunks),
    Rule(("optimizer_memory",), _resident),
    Rule(("parallel", "optimizer_memory"), _blocks),
    Rule(("recompute", "pipeline.recompute"), _recomputed_twice),
    Rule(("pipeline", "moe", "recompute", "swap"), _pairs),
)
