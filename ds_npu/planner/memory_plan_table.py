"""Shows a plan of recomputation as a table for people, and as the keys of the section that ask for it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_npu.config.recompute import RecomputeSection
from ds_npu.config.swap import SwapSection
from ds_npu.log import aligned
from ds_npu.models import names
from ds_npu.planner.memory_plan import (
    BudgetError,
    MemoryPlan,
    Moment,
    Option,
    PlannedLayer,
    fastest,
    measured,
    smallest,
)

WHOLE, NORM, ACTIVATION, ATTENTION, MLP = "block", "norm", "activation_function", "attention", "mlp"
"""Parts of a block that can be computed again: all of it, the norms, the operators between an MLP's linears, and the
attention, or the MLP or MoE, as a whole."""
LOSS = "the loss"
"""The loss's name among layers; its options are numbers of tokens of a chunk (``chunk_choice``)."""
GIB, MIB = 2**30, 2**20
KEY = "ds_npu.recompute.budget_gib"
LARGE_SHARE = 0.1
"""Part of a step's memory from which buckets of gradients are called large."""

Modules = Mapping[str, Mapping[str, Sequence[str]]]
"""The modules of each part of each layer."""
Section = dict[str, Any]


@dataclass(frozen=True)
class StagePlan:
    """The plan of the ranks of one pipeline stage, and its inputs."""

    stage: int
    layers: tuple[PlannedLayer, ...]
    moments: tuple[Moment, ...]
    modules: Modules
    plan: MemoryPlan


@dataclass(frozen=True)
class PlannedKeys:
    """Keys of the section that a plan has chosen."""

    recompute: RecomputeSection
    swap: SwapSection
    chunked_loss: int | None
    """Tokens of a chunk; None where the plan chooses none."""


def planned_keys(stages: Sequence[StagePlan]) -> PlannedKeys:
    """The keys of the section that ask for the plans of ``stages``."""
    found: dict[str, list[str]] = {}
    tokens: int | None = None
    for stage in stages:
        for layer, option in zip(stage.layers, stage.plan.options, strict=True):
            if layer.name == LOSS:
                tokens = int(option.parts[0])
                continue
            for part in option.parts:
                key = part if part in (NORM, ACTIVATION) else "modules"
                of_part = stage.modules[layer.name].get(part, ()) if part in (ATTENTION, MLP) else [layer.name]
                found.setdefault(key, []).extend(of_part)
    chosen = {key: globs(found.get(key, ())) for key in ("modules", NORM, ACTIVATION)}
    recompute = RecomputeSection(
        modules=chosen["modules"], norm=chosen[NORM] or False, activation_function=chosen[ACTIVATION] or False
    )
    swapped = [stage.layers[index].name for stage in stages for index in stage.plan.pattern.layers]
    swap = SwapSection(activations=globs(swapped), depth=1) if swapped else SwapSection()
    return PlannedKeys(recompute, swap, tokens)


def section_of(stages: Sequence[StagePlan]) -> Section:
    """The section of a config that asks for the plans of ``stages``."""
    keys = planned_keys(stages)
    parts = {"recompute": keys.recompute, "swap": keys.swap}
    found = {key: dict(sorted(part.model_dump(exclude_defaults=True).items())) for key, part in parts.items()}
    chunks = {} if keys.chunked_loss is None else {"chunked_loss": keys.chunked_loss}
    return {key: each for key, each in found.items() if each} | chunks


def globs(modules: Sequence[str]) -> list[str]:
    """Globs that match exactly ``modules``, which differ in their indices, or in more."""
    groups: dict[str, list[str]] = {}
    for each in dict.fromkeys(modules):
        groups.setdefault(names.generic(each), []).append(each)
    return [glob for group in groups.values() for glob in names.abbreviated(group).split(", ")]


def plan_lines(stages: Sequence[StagePlan], budget_gib: float, buffer_bytes: int, machine: str) -> Iterator[str]:
    """Yield lines for people; ``buffer_bytes``: communicators and a margin; ``machine`` has the assumed speeds."""
    yield f"Recomputation for a budget of {budget_gib:g} GiB a rank (times: estimates for {machine})"
    for stage in stages:
        of = f", pipeline rank {stage.stage}" if len(stages) > 1 else ""
        rows = [("layers", "computed again", "kept of each, MiB", "extra ms of each"), *_rows(stage)]
        yield from (f"  {row}" for row in aligned(rows))
        least = measured(stage.layers, stage.moments, [smallest(each) for each in stage.layers])
        most = measured(stage.layers, stage.moments, [fastest(each) for each in stage.layers])
        yield (
            f"  peak{of}: {size_text(stage.plan.peak_bytes + buffer_bytes)} in {stage.plan.tightest}"
            f" ({size_text(buffer_bytes)} of it HCCL's buffers and a margin); extra time of a micro-batch: "
            f"{1e3 * stage.plan.seconds:.3g} ms"
        )
        if stage.plan.pattern.layers:
            yield (
                f"  on the host: {size_text(stage.plan.host_bytes(stage.moments))}; copies make a micro-batch wait "
                f"{1e3 * stage.plan.wait_seconds:.3g} ms of these"
            )
        yield (
            f"  with nothing computed again {size_text(most.peak_bytes + buffer_bytes)}; with the most "
            f"{size_text(least.peak_bytes + buffer_bytes)} and {1e3 * least.seconds:.3g} ms"
        )
    yield f'  the same without a budget: "ds_npu": {json.dumps(section_of(stages))}'


def _rows(stage: StagePlan) -> Iterator[tuple[str, str, str, str]]:
    groups: dict[tuple[Option, bool], list[str]] = {}
    for index, (layer, option) in enumerate(zip(stage.layers, stage.plan.options, strict=True)):
        groups.setdefault((option, index in stage.plan.pattern.on_host), []).append(layer.name)
    for (option, is_swapped), layers in groups.items():
        if layers == [LOSS]:
            chunk = f"{option.kept_bytes / MIB:.3g} at a time"
            yield LOSS, f"in chunks of {option.parts[0]} tokens", chunk, f"{1e3 * option.seconds:.3g}"
            continue
        again = (", ".join(option.parts) or "nothing") + (", swapped" if is_swapped else "")
        yield ", ".join(globs(layers)), again, f"{option.kept_bytes / MIB:.3g}", f"{1e3 * option.seconds:.3g}"


@dataclass(frozen=True)
class Buckets:
    """The buffers in which ZeRO collects gradients."""

    elements: int
    """Elements of each bucket, as the config says."""
    size: int
    """Bytes of all buckets."""
    largest_weight: int
    """Elements of the model's largest weight, which is all that a bucket need hold."""


def budget_refusal(
    errors: Mapping[int, BudgetError], budget_gib: float, buffer_bytes: int, buckets: Buckets | None
) -> str:
    """Why ``budget_gib`` is impossible; ``errors``: by pipeline rank; ``buckets``: of the rank that raises it."""
    stage, error = max(errors.items(), key=lambda pair: pair[1].least.peak_bytes)
    needed = error.least.peak_bytes + buffer_bytes
    where = f" of pipeline rank {stage}" if len(errors) > 1 or stage else ""
    of_buckets, smaller = "", ""
    if buckets is not None and buckets.size >= LARGE_SHARE * needed and buckets.elements > buckets.largest_weight:
        of_buckets = (
            f" ({size_text(buckets.size)} of it are DeepSpeed's buckets of gradients, "
            f"zero_optimization.reduce_bucket_size: {buckets.elements:,} elements)"
        )
        smaller = (
            f"zero_optimization.reduce_bucket_size {buckets.largest_weight}, the elements of the largest weight, or "
            "some times as many; "
        )
    return (
        f"{KEY}: found {budget_gib:g}; the least that works here is {up_to_gib(needed)}: with the most computed "
        f"again, tensors take {size_text(error.least.peak_bytes)}{of_buckets} in {error.least.tightest}{where}, and "
        f"HCCL's buffers and a margin {size_text(buffer_bytes)}. What to do: {smaller}a larger budget; or smaller "
        "micro-batches, ds_npu.chunked_loss 'planned', a higher ZeRO stage, ds_npu.optimizer_memory, or more tensor, "
        "context or pipeline ranks"
    )


def too_early(errors: Mapping[int, BudgetError], budget_gib: float, buffer_bytes: int) -> str:
    """The error of a budget that is too small before the first optimizer step, which may need more."""
    needed = max(each.least.peak_bytes for each in errors.values()) + buffer_bytes
    return (
        f"{KEY}: found {budget_gib:g}; forward and backward alone need {up_to_gib(needed)}. The first optimizer step "
        "follows, to see what that needs; an error before the second one names the least budget that works"
    )


def up_to_gib(size: int) -> float:
    """``size`` bytes in GiB, rounded up to six decimals."""
    return math.ceil(1e6 * size / GIB) / 1e6


def size_text(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
