"""Where DeepSpeed accumulates the gradients of an engine, for matrix products to add to.

Read from DeepSpeed 0.19.8, runtime: without ZeRO, and in ZeRO 1 whose gradients are kept in the model's dtype, it is
``weight.grad`` (engine.py, zero/stage_1_and_2.py); in ZeRO 1 with another ``grad_accum_dtype`` it is
``weight.grad_accum``; and for bf16 with float32 gradients it is the flat buffer of BF16_Optimizer. From ZeRO 2 on there
is none: every micro-batch's gradient is copied into a bucket, reduced, and only its shard is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_npu.parallel.tensor.direct_linear import direct_weights, is_plain, use_direct_gradient
from ds_npu.parallel.tensor.weight_gradient import GRADIENT_BUFFER, Buffer, GradientBuffer

KEY = "ds_npu.fused_ops.matmul_accumulate"


def install_gradient_buffers(engine: Any) -> list[str]:
    """Let the linear layers of ``engine``, which is complete, add weight gradients where DeepSpeed accumulates them.

    Returns why it does not where it does not: for the engine, or for some of its weights; empty where all are added.
    """
    remove_gradient_buffers(engine.module)
    if reason := _why_not(engine):
        return [f"{KEY} has no effect: {reason}"]
    for module in list(engine.module.modules()):
        if is_plain(module):
            use_direct_gradient(module)
    weights = {name: weight for name, weight in direct_weights(engine.module) if weight.requires_grad}
    if not weights:
        return [f"{KEY} has no effect: {type(engine.module).__name__} has no linear layer that is trained"]
    buffer_of = _accumulator(engine.optimizer)
    ordinary = {}
    for name, weight in weights.items():
        if weight._backward_hooks:
            ordinary[name] = "a hook of its own changes its gradient (a sum over ranks), and must be given it"
        elif (buffer := buffer_of(weight)) is None:
            ordinary[name] = "the optimizer does not have it"
        else:
            GradientBuffer(weight, buffer)
    return [f"{KEY} leaves out {name}: {reason}" for name, reason in ordinary.items()]


def remove_gradient_buffers(model: nn.Module) -> None:
    """Forget the buffers of an engine that ``model`` had before; its weights have ordinary gradients again."""
    for parameter in model.parameters():
        GRADIENT_BUFFER.remove(parameter)


def _why_not(engine: Any) -> str | None:
    optimizer = engine.optimizer
    if engine.is_deepcompile_enabled():
        return "DeepCompile makes the backward itself; leave compile.deepcompile out to use it"
    if isinstance(optimizer, BF16_Optimizer):
        folded = vars(optimizer).get("autoep_folding_tp_group") is not None
        return "AutoEP folding corrects every gradient before it is accumulated" if folded else None
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        if vars(optimizer).get("zenflow"):
            return "ZenFlow picks gradients apart before it accumulates them; leave zenflow out to use it"
        return _reduced_each_time(2) if optimizer.partition_gradients else None
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return _reduced_each_time(3)
    if isinstance(optimizer, ZeROOptimizer):
        return f"it is not known where {type(optimizer).__name__} accumulates gradients"
    return None


def _reduced_each_time(stage: int) -> str:
    return (
        f"ZeRO {stage} copies the gradient of every micro-batch into a bucket, reduces it and keeps its shard alone, "
        "so whole gradients are accumulated nowhere; use zero_optimization.stage 0 or 1, or leave the key out"
    )


def _accumulator(optimizer: Any) -> Callable[[nn.Parameter], Buffer | None]:
    """From a weight to its buffer, None for one that ``optimizer`` does not accumulate."""
    if isinstance(optimizer, BF16_Optimizer):
        places = {
            id(weight): (group, index)
            for group, weights in enumerate(optimizer.bf16_groups)
            for index, weight in enumerate(weights)
        }
        return lambda weight: _high_precision(optimizer, weight, *places[id(weight)]) if id(weight) in places else None
    if isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.use_grad_accum_attribute:
        wide = optimizer.gradient_accumulation_dtype
        return lambda weight: _grad_accum(weight, wide) if "grad_accum" in vars(weight) else None
    return _grad


def _grad(weight: nn.Parameter) -> Buffer:
    """``weight.grad``. A step's first product becomes it, unless it is of a lower dtype (autocast)."""

    def buffer(dtype: torch.dtype) -> torch.Tensor | None:
        if weight.grad is None and dtype != weight.dtype:
            weight.grad = torch.zeros_like(weight)
        return weight.grad

    return buffer


def _grad_accum(weight: nn.Parameter, wide: torch.dtype) -> Buffer:
    """``weight.grad_accum``, which DeepSpeed drops after each step."""
    marks = vars(weight)

    def buffer(dtype: torch.dtype) -> torch.Tensor:
        if marks["grad_accum"] is None:
            marks["grad_accum"] = torch.zeros_like(weight, dtype=wide)
        found: torch.Tensor = marks["grad_accum"]
        return found

    return buffer


def _high_precision(optimizer: BF16_Optimizer, weight: nn.Parameter, group: int, index: int) -> Buffer:
    """The weight's part of the flat gradient, with the records BF16_Optimizer._update_hp_grad makes of its use."""
    flat = optimizer.fp32_groups_gradients[group][index]
    gradient: torch.Tensor = flat.view(weight.shape)

    def buffer(dtype: torch.dtype) -> torch.Tensor:
        optimizer.fp32_groups_has_gradients[group][index] = True  # A list that is made anew for each step.
        vars(weight)["_hp_grad"] = flat
        return gradient

    return buffer
