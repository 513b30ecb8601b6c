"""Adam over a list of tensors with the device's fused AdamW."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from deepspeed.ops.op_builder import npu
from torch.utils.weak import WeakIdKeyDictionary

from ds_npu.ops.builders import builder

# The step the kernel is told, always: at it, both of its bias corrections are 1 in float32 for beta up to 0.99998, so
# they add no rounding error, and the tensor it stands in is made once per device.
KERNEL_STEP = 2**20


def kernel_scalars(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int | None
) -> tuple[float, float, float]:
    """(lr, eps, weight decay) that make AdamW at ``KERNEL_STEP`` do what AdamW does at ``step``.

    ``step`` None: without bias correction. The fused update is lr * m / k1 / (sqrt(v / k2) + eps) with
    k = 1 - beta**step, so both corrections fold into lr and eps; the decay, 1 - lr * weight_decay, is kept.
    Raises ValueError for a step below 1.
    """
    if step is not None and step < 1:
        raise ValueError(f"Adam's step is {step}; it counts from 1")
    true1, true2 = (1.0, 1.0) if step is None else (1 - betas[0] ** step, 1 - betas[1] ** step)
    kernel1, kernel2 = 1 - betas[0] ** KERNEL_STEP, 1 - betas[1] ** KERNEL_STEP
    root = math.sqrt(true2 / kernel2)
    kernel_lr = lr * root * kernel1 / true1
    return kernel_lr, eps * root, weight_decay * lr / kernel_lr if kernel_lr else 0.0


class NpuFusedAdam:
    """DeepSpeed's ``multi_tensor_adam`` on torch's fused AdamW, which torch_npu maps to aclnnApplyAdamWV2.

    Against deepspeed/ops/op_builder/npu/fused_adam.py: one call for all tensors, no tensor copied to the device per
    call, ``bias_correction`` and the overflow flag honoured. The kernel itself ignores ``found_inf`` (Ascend/op-plugin,
    op_plugin/ops/opapi/FusedAdamWKernelNpuOpApi.cpp), and torch_npu has no fused Adam with L2 decay there, so the flag
    is read here and L2 decay is added to the gradient.
    """

    _steps: ClassVar[dict[torch.device, torch.Tensor]] = {}
    _flags: ClassVar[Any] = WeakIdKeyDictionary()

    @classmethod
    @torch.no_grad()
    def multi_tensor_adam(  # noqa: PLR0913, PLR0917 - DeepSpeed's signature
        cls,
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
        """Updates parameters and both moments in place; leaves them as they are where the flag is not 0.

        ``tensor_lists`` is (gradients, parameters, first moments, second moments), equal in length and on one device.
        """
        grads, params, exp_avgs, exp_avg_sqs = (list(tensors) for tensors in tensor_lists)
        if not params or cls._overflowed(noop_flag_buffer):
            return
        if not adam_w_mode and weight_decay:
            grads = list(torch._foreach_add(grads, params, alpha=weight_decay))
        lr, epsilon, decay = kernel_scalars(
            float(lr), (beta1, beta2), epsilon, weight_decay if adam_w_mode else 0.0, step if bias_correction else None
        )
        steps = [cls._step_on(params[0].device)] * len(params)
        torch._fused_adamw_(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            amsgrad=False,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=epsilon,
            maximize=False,
        )

    @classmethod
    def _step_on(cls, device: torch.device) -> torch.Tensor:
        if device not in cls._steps:
            cls._steps[device] = torch.full((), KERNEL_STEP, dtype=torch.int64, device=device)
        return cls._steps[device]

    @classmethod
    def _overflowed(cls, flag: torch.Tensor) -> bool:
        # Reading it makes the host wait for the device, so it is read again only after it was written.
        seen = cls._flags.get(flag)
        if seen is None or seen[0] != flag._version:
            seen = cls._flags[flag] = (flag._version, bool(flag.item()))
        return bool(seen[1])


class FusedAdamBuilder(builder.AscendPaths, npu.FusedAdamBuilder):  # type: ignore[misc]
    """Adam and AdamW (``FusedAdam``)."""

    def load(self, verbose: bool = True) -> type[NpuFusedAdam]:
        return NpuFusedAdam
