"""Marks and process groups of parameters that DeepSpeed reads, derived from the placement of each parameter."""

from __future__ import annotations

import dataclasses

import torch.distributed as dist
from torch import nn

from ds_npu.models import names
from ds_npu.models.zero3 import partition, unpartitioned_shape
from ds_npu.parallel.runtime.placement import Placement, placement_of, set_placement
from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute
from ds_npu.topology.degrees import Axis
from ds_npu.topology.topology import Topology

TENSOR_PARALLEL = TensorAttribute[bool]("tensor_model_parallel")
"""DeepSpeed counts the gradient of a parameter with this mark on every model-parallel rank, else on the first only."""
MODEL_PARALLEL = TensorAttribute[bool]("model_parallel")
"""The same mark under the name that Megatron-LM's older layers give it."""
ALL_REDUCED = TensorAttribute[bool]("allreduce")
"""False on the weights of experts: DeepSpeed reduces their gradients over another group (moe/utils.py)."""
EXPERT_GROUP_NAME = TensorAttribute[str]("group_name")
"""The name under which ``deepspeed.utils.groups`` has the groups of an expert's weight."""
ZERO_GROUP = TensorAttribute[dist.ProcessGroup]("ds_zero_partition_process_group")
"""The group over which ZeRO-3 shards a parameter (runtime/zero/partition_parameters.py)."""


def expert_group_name(topology: Topology) -> str:
    """The name as DeepSpeed forms it, which reads its end as a number (utils/groups.py, _get_max_expert_size)."""
    return f"ep_size_{topology.size('ep', 'etp')}"


def complete_placements(model: nn.Module, topology: Topology, stage_axes: tuple[Axis, ...], zero_stage: int) -> None:
    """Complete the placement of every parameter of ``model``, and mark it for DeepSpeed accordingly.

    ``stage_axes``: ("pp",) where each rank along it has other layers, () where each has the whole model. Raises
    ValueError for stages under ZeRO 3, and for an expert's weight that ranks along the axes of experts hold alike.
    """
    if stage_axes and zero_stage == 3:
        raise ValueError(
            "zero_optimization.stage: found 3 for a model that is cut into stages, whose micro-batches would each "
            "gather every weight. What to do: stage 0, 1 or 2"
        )
    for name, parameter in model.named_parameters():
        placement = placement_of(parameter)
        absent = set(stage_axes)
        if not placement.sharded and (TENSOR_PARALLEL.get(parameter) or MODEL_PARALLEL.get(parameter)):
            absent.add("tp")  # A tensor-parallel layer of the user's own: nobody tells which ranges.
        shape = list(unpartitioned_shape(parameter))
        for sharding in placement.sharded.values():
            shape[sharding.dim] = sharding.size
        placement = dataclasses.replace(placement, name=names.plain(name), shape=tuple(shape), absent=frozenset(absent))
        set_placement(parameter, placement)
        _mark(parameter, placement, topology, zero_stage)


def _mark(parameter: nn.Parameter, placement: Placement, topology: Topology, zero_stage: int) -> None:
    if placement.is_expert:
        alike = [axis for axis in placement.copied if axis != "pp" and topology.size(axis) > 1]
        if alike:
            raise ValueError(
                f"{placement.name} is an expert's weight that the ranks along {', '.join(alike)} hold alike; ds_npu "
                "reduces gradients of experts that are sharded along every axis of the expert view"
            )
        ALL_REDUCED.set(parameter, False)
        EXPERT_GROUP_NAME.set(parameter, expert_group_name(topology))
    if placement.is_expert or placement.part("tp") != "replicated":
        TENSOR_PARALLEL.set(parameter, True)
    if zero_stage == 3:
        # DeepSpeed cannot gather an empty weight (an expert of a list on other ranks): it remains on each rank.
        is_empty = 0 in unpartitioned_shape(parameter)
        ZERO_GROUP.set(parameter, topology.group(*(() if is_empty else placement.data_axes)))


def equalise_copies(model: nn.Module, topology: Topology) -> None:
    """Broadcast weights that ranks along other axes than data hold alike; DeepSpeed does so along the data axes.

    If zero.Init has sharded a weight, this rank's part of it is broadcast.
    """
    for parameter in model.parameters():
        axes = tuple(axis for axis in placement_of(parameter).copied if topology.size(axis) > 1)
        if axes:
            shard = partition(parameter)
            values = parameter.data if shard is None else shard.data
            dist.broadcast(values, topology.ranks(*axes)[0], group=topology.group(*axes))
