"""Corrections of DeepSpeed's ZeRO 1 and 2: the dtype of reductions, and hooks that flattening drops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ds_npu.zero_ext.method_wraps import MethodLevel, wrap_method


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
