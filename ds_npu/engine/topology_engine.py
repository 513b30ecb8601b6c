"""The base class of the parts of ds_npu's engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ds_npu.engine.failures.joint_calls import JointCalls
from ds_npu.topology.degrees import Axis
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.step_flop import StepFlop
from ds_npu.zero_ext.training_engine import EngineEvents


class TopologyEngine(DeepSpeedEngine):  # type: ignore[misc]
    """DeepSpeedEngine, whose ranks are those of a topology. Each subclass changes calls of one kind."""

    module: nn.Module
    device: torch.device
    micro_steps: int
    has_moe_layers: bool
    checkpoint_engine: Any
    inside_no_sync_ctxt: bool
    topology: Topology
    model_axes: tuple[Axis, ...]
    """The axes that shard the model: mpu.CUT_INTO_STAGES or mpu.WHOLE_ON_EACH_STAGE."""
    events: EngineEvents
    joint_calls: JointCalls
    step_flop: StepFlop | None = None
    reassembled: dict[str, Any] | None = None
    """The content that this rank's files would have, while a checkpoint of another layout is loaded."""

    @property
    def allowed_classes(self) -> Sequence[Any]:
        """The classes that files of checkpoints may hold besides tensors and plain Python values."""
        return ()

    def finish_saving(self) -> None:
        """Wait for a save that runs behind training."""

    def put_own_files(self, *args: Any, **kwargs: Any) -> None:
        """Let a transaction save what this rank has in a checkpoint."""

    def factor_of_gradients(self) -> float | None:
        """The factor by which gradients are multiplied after a backward: 1, except in pipeline stages."""
        return 1.0
