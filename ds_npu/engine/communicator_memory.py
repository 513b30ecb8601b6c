"""The device memory that HCCL's buffers take on a rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from ds_npu.features.context_parallel.sharded_sequences import algorithm_choice_of
from ds_npu.planner.communicators import MIB, planned_communicators
from ds_npu.topology.degrees import Degrees


def communicator_bytes(model: nn.Module, degrees: Degrees, ds_config: dict[str, Any]) -> int:
    """Bytes of all communicators that this rank opens; none in a world of one rank, or over another backend."""
    if dist.get_backend() != "hccl" or dist.get_world_size() == 1:
        return 0
    choice = algorithm_choice_of(model)
    algorithm = None if choice is None or choice.is_open else choice.axis.algorithm
    return MIB * sum(each.device_mib for each in planned_communicators(degrees, ds_config, algorithm))
