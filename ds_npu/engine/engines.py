"""DeepSpeed's three training engines, with the topology of a ``"ds_npu"`` section and the gradient rule.

The rule (docs: architecture section 4): for every stage of ZeRO, losses, gradients and the gradient norm are those
of one process doing the whole batch. Context peers return shares of the loss that add up to it; DeepSpeed sums over
them and averages over dp.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import nn

from ds_npu.zero_ext.sequence_factor import restore_sequence_factor


class TopologyMixin:
    """What ds_npu changes in any of DeepSpeed's engines: groups, reductions, replicas."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.session = kwargs["config_class"].ds_npu
        self.topology = self.session.topology
        kwargs["mpu"] = self.session.mpu
        kwargs.pop("mesh_device", None)
        self.is_float64 = any(parameter.dtype == torch.float64 for parameter in kwargs["model"].parameters())
        super().__init__(*args, **kwargs)

    def _configure_distributed_model(self, model: nn.Module) -> None:
        self._shard_over_samples_and_context(model)
        super()._configure_distributed_model(model)  # type: ignore[misc]
        if not isinstance(model, PipelineModule):
            self._mark_replicas(model)

    def _shard_over_samples_and_context(self, model: nn.Module) -> None:
        """ZeRO-3 takes a parameter's group from this attribute, and else the mpu's dp group, which lacks cp."""
        group = self.topology.group("dp", "cp")
        for parameter in model.parameters():
            parameter.ds_zero_partition_process_group = group  # type: ignore[attr-defined]

    def _mark_replicas(self, model: nn.Module) -> None:
        """Pipeline peers that hold the same model count once in the gradient norm."""
        for parameter in model.parameters():
            parameter.ds_pipe_replicated = self.topology.rank("pp") > 0  # type: ignore[attr-defined]

    def _broadcast_model(self) -> None:
        """Also to tensor and pipeline peers where they hold the same model: DeepSpeed stops at dp x cp."""
        super()._broadcast_model()  # type: ignore[misc]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(model, gradient accumulation): a float64 model keeps float64 gradients, which DeepSpeed would round."""
        types: tuple[torch.dtype, torch.dtype] = super().get_data_types()  # type: ignore[misc]
        return (torch.float64, torch.float64) if self.is_float64 else types


class NpuEngine(TopologyMixin, DeepSpeedEngine):  # type: ignore[misc]
    """DeepSpeedEngine over the topology."""


class NpuPipelineEngine(TopologyMixin, PipelineEngine):  # type: ignore[misc]
    """PipelineEngine over the topology."""


class NpuDualPipeVEngine(TopologyMixin, DualPipeVEngine):  # type: ignore[misc]
    """DualPipeVEngine over the topology."""


ENGINES: dict[type, type] = {
    DeepSpeedEngine: NpuEngine,
    PipelineEngine: NpuPipelineEngine,
    DualPipeVEngine: NpuDualPipeVEngine,
}
"""DeepSpeed's engine -> ours."""
