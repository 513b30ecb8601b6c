"""``ds_npu.hccl``: HCCL's communicators are opened in one order before they are used, with the options of the section.

torch_npu opens a communicator when a group is first used. Within a step no message tells of that wait, and ranks that
first use their groups in different orders wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch.distributed as dist
from torch import nn

from ds_npu.capability import BUFFER_SIZE
from ds_npu.comm.communicator import add_to_hccl_config, hccl_config_of, is_open, open_communicator
from ds_npu.config.hccl import HcclSection
from ds_npu.features.build import Build, Feature
from ds_npu.features.declaration import Change
from ds_npu.log import logger
from ds_npu.models.hugging_face_model import outermost_hugging_face_models, setting
from ds_npu.planner.communicators import GROUP_BUFFER, SIZES, Communicator, CommunicatorPlan, MessageSizes, default_mib
from ds_npu.topology.degrees import Box, Degrees, box_ranks
from ds_npu.topology.topology import GROUPS, Topology


def communicator_plan(section: HcclSection, build: Build) -> CommunicatorPlan:
    """The communicators of an engine, with the sizes of messages that the config of its model tells."""
    degrees = build.topology.degrees
    sizes = MessageSizes.of(build.ds_config, degrees, _sizes(build.model))
    return CommunicatorPlan(degrees, build.ds_config, section, sizes)


def _sizes(model: nn.Module) -> dict[str, int | None]:
    configs = [each.config.get_text_config() for each in outermost_hugging_face_models(model)]
    return {name: setting(configs[0], name, int) if len(configs) == 1 else None for name in SIZES}


def open_communicators(plan: CommunicatorPlan, topology: Topology, planned: Sequence[Communicator]) -> None:
    """Open those of ``planned`` that are not yet open, in their order, with a line in the log for each.

    All ranks of the world call it at the same time. Raises RuntimeError, with the name and the ranks of a communicator
    that cannot be opened.
    """
    found = [(each, topology.group_of(box_ranks(each.box, topology.global_rank))) for each in planned if each.box]
    groups = [(each, group) for each, group in found if group is not None and not each.only_checkpoints]
    closed = []
    for each, group in groups:
        if is_open(group):
            _warn_of_options(each.name, group, plan)
        else:
            closed.append((each.name, group))
    for index, (name, group) in enumerate(closed, 1):
        ranks = dist.get_process_group_ranks(group)
        add_to_hccl_config(group, plan.options(ranks, "" if plan.is_in_grid(ranks) else name))
        mib = hccl_config_of(group).get(BUFFER_SIZE, default_mib(GROUP_BUFFER))
        seconds = open_communicator(group, name)
        line = "HCCL communicator %d of %d, %s: %d ranks, 2 buffers of %d MiB, opened in %.2f s"
        logger().info(line, index, len(closed), name, len(ranks), mib, seconds)


def _warn_of_options(name: str, group: dist.ProcessGroup, plan: CommunicatorPlan) -> None:
    asked = plan.hccl.options(name, None)
    has = hccl_config_of(group)
    if other := {key: value for key, value in asked.items() if has.get(key) != value}:
        logger().warning(
            "ds_npu.hccl: the communicator %s was open before the engine was made, without %s, which are ignored. What "
            "to do: make the engine before the script sends anything over this group",
            name,
            other,
        )


def dense_boxes(degrees: Degrees) -> set[Box]:
    """The layouts of the groups that every model uses."""
    return {degrees.box("pp", "dp", "cp", "tp"), *(degrees.box(*axes) for axes in GROUPS)}


def _parts(section: HcclSection, build: Build) -> Iterable[Change]:
    is_there = not build.is_planned and dist.is_initialized()
    if is_there and dist.get_world_size() > 1 and dist.get_backend() == "hccl":
        plan = communicator_plan(section, build)
        # Before anything is sent over them: afterwards their buffers have another size.
        yield Change("provides", "communicators", "opened before they are used", partial(_open_dense, plan, build))


def _open_dense(plan: CommunicatorPlan, build: Build) -> None:
    planned = plan.communicators(None, in_stages=not build.is_pipeline)
    dense = dense_boxes(plan.degrees)
    open_communicators(plan, build.topology, [each for each in planned if each.box in dense])


def open_others(plan: CommunicatorPlan, topology: Topology, planned: Sequence[Communicator], has_experts: bool) -> None:
    """Open those of ``planned`` that only some models use: experts', and a context algorithm's."""
    passed = dense_boxes(plan.degrees) if has_experts else plan.boxes()
    open_communicators(plan, topology, [each for each in planned if each.box not in passed])


HCCL: Feature[HcclSection] = Feature("hccl", parts=_parts)
