"""AdamW with torch's fused kernel, which torch_npu maps to aclnnApplyAdamWV2."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from ds_npu.ops.adamw import AdamStep, overflowed

# The kernel always gets this step number: both bias corrections are then 1 in float32 for beta up to 0.99998 and add no
# rounding error, and the tensor that holds it is made once for each device.
KERNEL_STEP = 2**20


def kernel_scalars(numbers: AdamStep) -> tuple[float, float, float]:
    """(lr, eps, weight decay) that make AdamW at ``KERNEL_STEP`` do what AdamW does at the step of ``numbers``.

    The fused update is lr * m / k1 / (sqrt(v / k2) + eps) with k = 1 - beta**step, so both corrections fold into lr and
    eps; the decay, 1 - lr * weight_decay, is kept.
    """
    true1, true2 = numbers.corrections()
    kernel1, kernel2 = (1 - beta**KERNEL_STEP for beta in numbers.betas)
    root = math.sqrt(true2 / kernel2)
    kernel_lr = numbers.lr * root * kernel1 / true1
    decay = numbers.weight_decay * numbers.lr / kernel_lr if kernel_lr and numbers.decoupled else 0.0
    return kernel_lr, numbers.eps * root, decay


@functools.cache
def _step_on(device: torch.device) -> torch.Tensor:
    return torch.full((), KERNEL_STEP, dtype=torch.int64, device=device)


@torch.no_grad()
def adamw_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    numbers: AdamStep,
    overflow: torch.Tensor | None = None,
) -> None:
    """``ds_npu.ops.adamw``, one call for all tensors and one kernel a tensor; nothing is copied to the device.

    The kernel itself ignores ``found_inf`` (Ascend/op-plugin, op_plugin/ops/opapi/FusedAdamWKernelNpuOpApi.cpp), and
    torch_npu has no fused Adam with L2 decay there, so the flag is read here and L2 decay is added to the gradient.
    """
    if not params or overflowed(overflow):
        return
    if numbers.weight_decay and not numbers.decoupled:
        grads = torch._foreach_add(list(grads), list(params), alpha=numbers.weight_decay)
    lr, eps, decay = kernel_scalars(numbers)
    torch._fused_adamw_(
        list(params),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        [_step_on(params[0].device)] * len(params),
        amsgrad=False,
        lr=lr,
        beta1=numbers.betas[0],
        beta2=numbers.betas[1],
        weight_decay=decay,
        eps=eps,
        maximize=False,
    )
