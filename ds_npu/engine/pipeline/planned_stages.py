"""The pipeline stages that a model would have in a planned world, for ``ds_npu check``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ds_npu.config.sections import DsNpuConfig
from ds_npu.features.build import Build
from ds_npu.features.driver import apply_features, values_in
from ds_npu.features.pipeline.layout import PipelineLayout, blocks_of_stages, costs, head_cost, layout_of
from ds_npu.features.pipeline.stages import StageModules, stages_of
from ds_npu.models import names
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import PlannedTopology


@dataclass(frozen=True)
class PlannedStages:
    """The stages of a model, and what the pipeline ranks hold of it."""

    layout: PipelineLayout
    blocks: tuple[tuple[str, ...], ...]
    """Names of the blocks by stage."""
    loads: tuple[float, ...]
    """Elements of the matrices that a token is multiplied by, by stage; the last stage has the head."""
    held: tuple[int, ...]
    """Elements of the parameters by pipeline rank, with the shards of all axes, before ZeRO."""


def planned_stages(model: nn.Module, config: DsNpuConfig, degrees: Degrees) -> PlannedStages:
    """The stages of ``model``, which is whole and without weights; it is changed in place.

    Raises ValueError for a model, a division or a file of a schedule that is refused.
    """
    layout = layout_of(config.pipeline, degrees.pp)
    # With one pipeline rank: the whole model, and the shards of all other axes.
    topology = PlannedTopology(dataclasses.replace(degrees, pp=1))
    build = Build(topology, model, config.plan, "npu", is_planned=True)
    plan = build.block_plan
    every = stages_of(plan, blocks_of_stages(config.pipeline, model, plan, layout))
    of_block = dict(zip(plan.blocks, costs(model, plan), strict=True))
    loads = [sum(of_block[name] for name in each.blocks) for each in every]
    loads[-1] += head_cost(model, plan)
    apply_features(values_in(config), build)
    held = [held_parameters(model, [every[stage] for stage in layout.own(rank)]) for rank in range(layout.ranks)]
    return PlannedStages(layout, tuple(each.blocks for each in every), tuple(loads), tuple(held))


def held_parameters(model: nn.Module, own: Sequence[StageModules]) -> int:
    """How many elements of ``model``, whose weights are sharded already, a rank with the stages ``own`` holds.

    A weight that several modules share counts once.
    """
    absent = [name for name in own[0].absent if all(name in each.absent for each in own)]
    weights = model.named_parameters(remove_duplicate=False)
    mine = {id(each): each for name, each in weights if not any(names.is_inside(name, other) for other in absent)}
    return sum(each.numel() for each in mine.values())
