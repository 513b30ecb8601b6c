"""Models that were made under ``deepspeed.zero.Init``, and are then to be sharded over tensor or expert ranks.

transformers makes every model so once ZeRO 3 is on. ZeRO-3 has partitioned such weights when an engine is made; here
they become plain parameters that hold this rank's shards, which the engine's ZeRO-3 partitions again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
from torch import nn

from ds_npu.features.tensor_parallel.sharded_model import sharded_model_of
from ds_npu.models.attributes import copy_attributes
from ds_npu.models.zero3 import forget_partition, is_on_nvme, is_partitioned, unpartitioned_shape
from ds_npu.parallel.runtime.placement import has_experts, placement_of
from ds_npu.topology.topology import Topology


def is_transformers_config(config: Any) -> bool:
    """Whether ``config`` is the very object with which transformers enters zero.Init by itself."""
    # Nothing is imported: where transformers has not loaded this, it has no config.
    module: Any = sys.modules.get("transformers.integrations.deepspeed")
    return module is not None and config is module.deepspeed_config()


@contextmanager
def shards_from_partitions(model: nn.Module, topology: Topology) -> Iterator[None]:
    """Within the block, partitioned weights have their whole shapes, without memory; after it, their shards' values.

    In the block the weights are marked as sharded over ranks. After it they are gathered, one at a time, over
    the ranks among which zero.Init has partitioned them, and each rank keeps its shard; every rank takes part.
    Parameters remain the same objects. Where the block raises, they are left as they were. Models that are sharded
    already, and all models without tensor and expert ranks, are left alone. Raises ValueError for weights on NVMe.
    """
    partitions: dict[nn.Parameter, nn.Parameter] = {}
    by_tensor = topology.size("tp") > 1 and sharded_model_of(model) is None
    if by_tensor or (topology.size("ep", "etp") > 1 and not has_experts(model)):
        on_disk = next((name for name, each in model.named_parameters() if is_on_nvme(each)), None)
        if on_disk is not None:
            raise ValueError(
                f'zero_optimization.offload_param.device "nvme": zero.Init has given {on_disk} and others to an NVMe '
                "disk, from which ds_npu.parallel.tensor and expert cannot shard them. What to do: "
                'offload_param.device "cpu", or, where memory allows, a model that is not made under zero.Init'
            )
        partitions = {each: _moved_partition(each) for each in model.parameters() if is_partitioned(each)}
    try:
        yield
    except BaseException:
        for parameter, source in partitions.items():
            parameter.data = source.data
            copy_attributes(source, parameter)
        raise
    while partitions:
        parameter = next(iter(partitions))
        _fill(parameter, partitions.pop(parameter), topology)


def _moved_partition(parameter: nn.Parameter) -> nn.Parameter:
    """Move ZeRO-3's partition to a new parameter; ``parameter`` is left plain, of its whole shape, without memory."""
    source = nn.Parameter(parameter.data, requires_grad=False)
    copy_attributes(parameter, source)
    shape = unpartitioned_shape(parameter)
    forget_partition(parameter)
    parameter.data = parameter.new_zeros(()).expand(shape)
    return source


def _fill(parameter: nn.Parameter, source: nn.Parameter, topology: Topology) -> None:
    shardings = placement_of(parameter).sharded.items()
    with deepspeed.zero.GatheredParameters([source]):
        data = source.data
        for axis, sharding in shardings:
            data = sharding.take(data, topology.rank(axis))
        parameter.data = data if shardings else data.clone()
