"""Corrections of DeepSpeed's ZeRO 1 and 2: dtypes of reductions, waits of the host, and hooks that flattening drops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_npu.zero_ext.gradient_norm import EPSILON
from ds_npu.zero_ext.method_wraps import MethodLevel, replace_method, wrap_method


def reduce_in_float64(optimizer: Any) -> None:
    """Make ``optimizer``, which was made for gradients that travel in another dtype, reduce in float64.

    With experts DeepSpeed wants its reduce-scatter (0.19.8 runtime/zero/stage_1_and_2.py, _configure_moe_settings),
    which ZeRO 2 accepts for three dtypes only, and which rounds to float32 where there are context ranks
    (allreduce_bucket). What it does takes any dtype.
    """
    optimizer.ipg_buckets = {torch.float64: optimizer.ipg_buckets.pop(optimizer.communication_data_type)}
    optimizer.communication_data_type = torch.float64
    context_size = optimizer.sequence_parallel_size

    def allreduce_bucket(reduce: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Gradients were divided before; here the size only chooses the dtype.
        optimizer.sequence_parallel_size = 1
        try:
            return reduce(*args, **kwargs)
        finally:
            optimizer.sequence_parallel_size = context_size

    wrap_method(optimizer, "allreduce_bucket", allreduce_bucket, MethodLevel.CORRECTION)


def wait_for_norm_only(optimizer: Any) -> None:
    """Make a step of ``optimizer`` read one number from the device: whether the norm of its gradients is finite.

    DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, step) asks before whether any gradient is not finite, and again for
    the norm in each group that it clips. The norm is not finite where a gradient is not. Where gradients are on the
    host, or no norm is taken, DeepSpeed makes its own checks.
    """
    if type(optimizer) is not DeepSpeedZeroOptimizer or optimizer.cpu_offload or not optimizer.compute_grad_norm:
        return

    def has_overflow(partition_gradients: bool = True) -> bool:
        return False

    def unscale_and_clip_grads(grad_groups_flat: list[torch.Tensor], total_norm: torch.Tensor) -> None:
        scale = optimizer.loss_scale
        if optimizer.clip_grad > 0:
            # An invalid norm has ended the step; from other callers DeepSpeed takes it for an infinite one.
            norm = torch.where(torch.isfinite(total_norm) & (total_norm >= 0), total_norm, torch.inf)
            scale = ((norm / scale + EPSILON) / optimizer.clip_grad).clamp(min=1.0) * scale
        elif scale == 1:
            return
        for gradient in grad_groups_flat:
            gradient.mul_(1.0 / scale)

    replace_method(optimizer, "has_overflow", has_overflow, MethodLevel.CORRECTION)
    replace_method(optimizer, "unscale_and_clip_grads", unscale_and_clip_grads, MethodLevel.CORRECTION)


def attach_hooks_again(model: nn.Module) -> None:
    """Register with autograd again the hooks that the parameters of ``model`` list; none is called twice.

    DeepSpeed (0.19.8 runtime/zero/stage_1_and_2.py:1399) flattens parameters that require gradients, and after
    torch_npu 2.13's ``flatten_dense_tensors`` the hooks of ``register_hook`` on them are not called any more, nor those
    that are registered later, although the parameter still lists them.
    """
    for parameter in model.parameters():
        # The setter registers them with autograd.
        if parameter._backward_hooks:
            parameter._backward_hooks = parameter._backward_hooks
