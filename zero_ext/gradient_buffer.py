"""The buffers in which DeepSpeed accumulates the gradients of an engine, to which matrix products add them.

Read from DeepSpeed 0.19.8, runtime: without ZeRO, and in ZeRO 1 whose gradients are kept in the model's dtype, it is
``weight.grad`` (engine.py, zero/stage_1_and_2.py); in ZeRO 1 with another ``grad_accum_dtype`` it is
``weight.grad_accum``; and for bf16 with float32 gradients it is the flat buffer of BF16_Optimizer. From ZeRO 2 on there
is none: every micro-batch's gradient is copied into a bucket, reduced, and only its shard is kept. Where ZeRO 1 and 2
are bucketed (``bucketed_zero``) ``weight.grad`` is memory of the bucket, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute
from ds_npu.parallel.tensor.direct_layers import direct_weights, is_plain, use_direct_gradient
from ds_npu.parallel.tensor.weight_gradient import GRADIENT_SINK, Buffer, GradientSink
from ds_npu.zero_ext.bucketed_zero import BUCKETED, BucketedZero
from ds_npu.zero_ext.training_engine import TrainingEngine

KEY = "ds_npu.fused_ops.matmul_accumulate"
GRAD_ACCUM = TensorAttribute[torch.Tensor | None]("grad_accum")
HP_GRADIENT = TensorAttribute[torch.Tensor]("_hp_grad")
"""Attributes in which DeepSpeed keeps the accumulated gradient of a weight."""

ZERO = (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)


def install_gradient_buffers(engine: TrainingEngine) -> list[str]:
    """Make the linear layers of ``engine``, which is complete, add weight gradients where DeepSpeed accumulates them.

    Returns the reasons why not, for the engine or for some of its weights; none where all are added.
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
    buffer_of = accumulator(engine.optimizer)
    bucketed = _bucketed(engine.optimizer)
    ordinary = {}
    for name, weight in weights.items():
        if weight._backward_hooks:
            ordinary[name] = "a hook of its own changes its gradient (a sum over ranks), and must be given it"
        elif (buffer := buffer_of(weight)) is None:
            ordinary[name] = "the optimizer does not have it"
        elif bucketed is None:
            GradientSink(weight, buffer)
        else:
            GradientSink(weight, buffer, home=partial(bucketed.gradients.home_of, weight))
    return [f"{KEY} leaves out {name}: {reason}" for name, reason in ordinary.items()]


def remove_gradient_buffers(model: nn.Module) -> None:
    """Remove the sinks of an earlier engine of ``model``; its weights have ordinary gradients again."""
    for parameter in model.parameters():
        GRADIENT_SINK.remove(parameter)


def _why_not(engine: TrainingEngine) -> str | None:
    optimizer = engine.optimizer
    if reason := foreign_accumulation(engine):
        return reason
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        is_copied = optimizer.partition_gradients and _bucketed(optimizer) is None
        return _reduced_each_time(2) if is_copied else None
    return _reduced_each_time(3) if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) else None


def _bucketed(optimizer: object) -> BucketedZero | None:
    return BUCKETED.get(optimizer) if isinstance(optimizer, DeepSpeedZeroOptimizer) else None


def foreign_accumulation(engine: TrainingEngine) -> str | None:
    """Why nobody but DeepSpeed may add gradients where ``engine``'s optimizer accumulates them; None where one may."""
    optimizer = engine.optimizer
    if engine.is_deepcompile_enabled():
        return "DeepCompile makes the backward itself; leave compile.deepcompile out to use it"
    if isinstance(optimizer, BF16_Optimizer):
        folded = _setting(optimizer, "autoep_folding_tp_group") is not None
        return "AutoEP folding corrects every gradient before it is accumulated" if folded else None
    if isinstance(optimizer, DeepSpeedZeroOptimizer) and _setting(optimizer, "zenflow"):
        return "ZenFlow picks gradients apart before it accumulates them; leave zenflow out to use it"
    if isinstance(optimizer, ZeROOptimizer) and not isinstance(optimizer, ZERO):
        return f"it is not known where {type(optimizer).__name__} accumulates gradients"
    return None


def _setting(optimizer: Any, name: str) -> Any:
    """An attribute that not every supported DeepSpeed gives its optimizers; None without it."""
    return vars(optimizer).get(name)


def _reduced_each_time(stage: int) -> str:
    return (
        f"ZeRO {stage} copies the gradient of every micro-batch into a bucket, reduces it and keeps its shard alone, "
        "so whole gradients are accumulated nowhere; use zero_optimization.stage 0 or 1, or leave the key out"
    )


def accumulator(optimizer: Any) -> Callable[[nn.Parameter], Buffer | None]:
    """A function from a weight to its buffer; it returns None for a weight that ``optimizer`` does not accumulate."""
    if isinstance(optimizer, BF16_Optimizer):
        positions = {
            id(weight): (group, index)
            for group, weights in enumerate(optimizer.bf16_groups)
            for index, weight in enumerate(weights)
        }
        return lambda weight: (
            _high_precision(optimizer, weight, *positions[id(weight)]) if id(weight) in positions else None
        )
    if isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.use_grad_accum_attribute:
        dtype = optimizer.gradient_accumulation_dtype
        return lambda weight: partial(_grad_accum, weight, dtype) if GRAD_ACCUM.is_on(weight) else None
    return lambda weight: partial(_grad, weight)


def _grad(weight: nn.Parameter, dtype: torch.dtype) -> torch.Tensor | None:
    """``weight.grad``; None lets a step's first product become it, but not one of another dtype (autocast)."""
    if weight.grad is None and dtype != weight.dtype:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def _grad_accum(weight: nn.Parameter, accumulation_dtype: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """``weight.grad_accum``, which DeepSpeed sets to None after each step."""
    found = GRAD_ACCUM.get(weight)
    if found is None:
        found = torch.zeros_like(weight, dtype=accumulation_dtype)
        GRAD_ACCUM.set(weight, found)
    return found


def _high_precision(optimizer: BF16_Optimizer, weight: nn.Parameter, group: int, index: int) -> Buffer:
    """The weight's part of the flat gradient; records its use as BF16_Optimizer._update_hp_grad does."""
    flat = optimizer.fp32_groups_gradients[group][index]
    gradient: torch.Tensor = flat.view(weight.shape)

    def buffer(dtype: torch.dtype) -> torch.Tensor:
        optimizer.fp32_groups_has_gradients[group][index] = True  # DeepSpeed makes a new list for each step.
        HP_GRADIENT.set(weight, flat)
        return gradient

    return buffer
