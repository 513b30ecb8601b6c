"""Adam over a list of tensors with the device's fused AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.ops.op_builder import npu

from ds_npu.ops.adamw import AdamStep, adamw_
from ds_npu.ops.builders import builder


class NpuFusedAdam:
    """DeepSpeed's ``multi_tensor_adam`` on ``ds_npu.ops.adamw``.

    Unlike deepspeed/ops/op_builder/npu/fused_adam.py it makes one call for all tensors, copies no tensor to the device
    per call, and honours ``bias_correction`` and the overflow flag.
    """

    @staticmethod
    def multi_tensor_adam(  # noqa: PLR0913, PLR0917 - DeepSpeed's signature
        chunk_size: int,
        noop_flag_buffer: torch.Tensor,
        tensor_lists: Sequence[Sequence[torch.Tensor]],
        lr: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        step: int,
        adam_w_mode: int,
        bias_correction: int,
        weight_decay: float,
        *_: Any,
    ) -> None:
        """Update parameters and both moments in place; leave them as they are where the flag is not 0.

        ``tensor_lists`` is (gradients, parameters, first moments, second moments), equal in length and on one device.
        """
        grads, params, exp_avgs, exp_avg_sqs = (list(tensors) for tensors in tensor_lists)
        numbers = AdamStep(
            lr=float(lr),
            betas=(beta1, beta2),
            eps=epsilon,
            weight_decay=weight_decay,
            step=step if bias_correction else None,
            decoupled=bool(adam_w_mode),
        )
        adamw_(params, grads, exp_avgs, exp_avg_sqs, numbers, noop_flag_buffer)


class FusedAdamBuilder(builder.AscendPaths, npu.FusedAdamBuilder):  # type: ignore[misc]
    """Adam and AdamW (``FusedAdam``)."""

    def load(self, verbose: bool = True) -> type[NpuFusedAdam]:
        return NpuFusedAdam
