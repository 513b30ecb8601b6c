"""``ds_npu.parallel``: the number of ranks along each axis of the grid."""

from __future__ import annotations

import math

from ds_npu.config.problems import Problem
from ds_npu.config.section import MOST_RANKS, ContextRanks, Ranks, Section
from ds_npu.topology.degrees import Degrees


class ParallelSection(Section):
    """Sizes of the axes; the data-parallel size is what the world leaves: world / (tensor * context * pipeline)."""

    tensor: Ranks = 1
    """Ranks that share each weight matrix (tensor parallelism)."""
    sequence_parallel: bool = False
    """Split the activations between tensor-parallel regions along the sequence, over the tensor ranks."""
    context: ContextRanks = 1
    """Ranks that share each sequence (context parallelism)."""
    pipeline: Ranks = 1
    """Pipeline ranks, each with some of the layers; equals the stages of a deepspeed.PipelineModule."""
    expert: Ranks = 1
    """Ranks over which the experts of a mixture-of-experts layer are distributed, whole experts on each."""
    expert_tensor: Ranks = 1
    """Ranks that share each expert's weight matrices."""
    probe: bool = True
    """Try at start, on a copy of each kind of block, whether tensor and context ranks compute what it does whole."""


def fit(section: ParallelSection, world_size: int | None) -> tuple[Degrees, list[Problem]]:
    """The grid of ``world_size`` ranks and its mistakes; with mistakes, or without a size, the smallest that fits."""
    dense = {"tensor": section.tensor, "context": section.context, "pipeline": section.pipeline}
    expert = {"expert": section.expert, "expert_tensor": section.expert_tensor}
    peers = section.tensor * section.context
    experts = math.prod(expert.values())
    smallest = _degrees(section, experts // math.gcd(experts, peers))
    if world_size is None:
        return smallest, []
    if not 1 <= world_size <= MOST_RANKS:
        return smallest, [Problem("world size", world_size, f"an integer >= 1 and <= {MOST_RANKS}")]
    problems = []
    if world_size % math.prod(dense.values()):
        problems.append(_must_divide(dense, f"the world size {world_size}"))
    stage, rest = divmod(world_size, section.pipeline)
    if not rest and stage % experts:
        problems.append(_must_divide(expert, f"the {stage} ranks of a pipeline stage (data * context * tensor)"))
    return (smallest if problems else _degrees(section, stage // peers)), problems


def _degrees(section: ParallelSection, dp: int) -> Degrees:
    return Degrees(
        pp=section.pipeline,
        dp=dp,
        cp=section.context,
        tp=section.tensor,
        ep=section.expert,
        etp=section.expert_tensor,
    )


def _must_divide(factors: dict[str, int], what: str) -> Problem:
    product = math.prod(factors.values())
    large = {key: factor for key, factor in factors.items() if factor > 1}
    path = ", ".join(f"ds_npu.parallel.{key}" for key in large)
    if len(large) == 1:
        return Problem(path, product, f"a divisor of {what}")
    return Problem(path, tuple(large.values()), f"sizes whose product, {product} here, divides {what}")
