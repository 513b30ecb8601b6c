"""A hook that runs before DeepSpeed drops the gradients of a step that it skips, and these gradients.

Read from DeepSpeed 0.19.8, runtime: ZeRO 1 to 3 (zero/stage_1_and_2.py, zero/stage3.py) read in each step whether all
gradients are finite, where float32 or fp16 is trained, or bf16 with ``check_grad_overflow`` (the default), and call
``_update_scale(True)`` before they drop what is not. The optimizers for 16 bits without ZeRO (fp16/) call
``_skip_invalid_grad_norm``, BF16_Optimizer ``clear_hp_grads``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_npu.comm.host_copy import HostCopy
from ds_npu.zero_ext.method_wraps import MethodLevel, wrap_method

ZERO = (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
WITHOUT_ZERO = (FP16_Optimizer, FP16_UnfusedOptimizer)


class DelayedReading:
    """A number of the device, which the host reads without waiting for work that was queued after it."""

    def __init__(self, scalar: torch.Tensor) -> None:
        self.is_there = scalar.device.type == "cpu"
        self._copy = HostCopy(scalar.detach().float())

    def value(self) -> float:
        """The number; waits for the copy, if it has not been made yet."""
        return self._copy.read().item()


def before_a_skip(optimizer: Any, stop: Callable[[], object]) -> bool:
    """Call ``stop`` where ``optimizer`` is about to skip a step, unless fp16's loss scale can still be lowered.

    Returns False for an optimizer that reads no norm and skips nothing. It adds no wait of the host for the device.
    """
    if isinstance(optimizer, BF16_Optimizer):

        def clear_hp_grads(clear: Callable[[], None]) -> None:
            if optimizer.overflow:
                stop()
            clear()

        wrap_method(optimizer, "clear_hp_grads", clear_hp_grads, MethodLevel.FINITE)
        return True
    if isinstance(optimizer, WITHOUT_ZERO):

        def _skip_invalid_grad_norm(skip: Callable[[], object]) -> bool:
            if not _can_scale_down(optimizer):
                stop()
            return bool(skip())

        wrap_method(optimizer, "_skip_invalid_grad_norm", _skip_invalid_grad_norm, MethodLevel.FINITE)
        return True
    if not isinstance(optimizer, ZERO):
        return False

    def _update_scale(update: Callable[[bool], None], skips: bool = False) -> None:
        if skips and not _can_scale_down(optimizer):
            stop()
        update(skips)

    wrap_method(optimizer, "_update_scale", _update_scale, MethodLevel.FINITE)
    return not isinstance(optimizer, DeepSpeedZeroOptimizer) or _reads(optimizer)


def run_apart(engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the model of ``engine``, in its autocast; a backward of the returned output is none of the engine's."""
    with autocast_if_enabled(engine):
        return engine.module(*args, **kwargs)


def reduced_gradients(optimizer: Any) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """The parameters of which this rank holds a reduced gradient, or a piece of it; none of an offloaded optimizer."""
    if isinstance(optimizer, BF16_Optimizer):
        groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
    elif isinstance(optimizer, ZERO):
        stage_3 = isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
        parameters = optimizer.fp16_groups if stage_3 else optimizer.params_in_partition
        kept = [optimizer.averaged_gradients.get(index) or () for index in range(len(parameters))]
        groups = zip(parameters, kept, strict=True)
    else:
        parameters = optimizer.fp16_groups  # those of WITHOUT_ZERO, whatever their dtype
        groups = zip(parameters, [[each.grad for each in group] for group in parameters], strict=True)
    for group, gradients in groups:
        # ZeRO 1 and 2 pad the list to the length of the shard.
        for parameter, gradient in zip(group, gradients, strict=False):
            if gradient is not None:
                yield parameter, gradient


def _reads(optimizer: Any) -> bool:
    return bool(optimizer.check_grad_overflow or (optimizer.compute_grad_norm and optimizer.dtype != torch.bfloat16))


def _can_scale_down(optimizer: Any) -> bool:
    """Whether a skipped step is loss scaling at work, as each is under a loss scale that the config fixes."""
    if isinstance(optimizer, WITHOUT_ZERO):
        scale = optimizer.loss_scale_config
        return bool(
            scale.use_grad_scaling and not (scale.dynamic_loss_scale and scale.cur_scale <= scale.min_loss_scale)
        )
    if optimizer.torch_autocast_gradscaler is not None:
        return True
    if optimizer.dtype != torch.float16:
        return False
    scaler = optimizer.loss_scaler
    if not scaler.dynamic:
        return True
    return not (scaler.cur_scale == scaler.min_scale and (scaler.delayed_shift == 1 or scaler.cur_hysteresis == 1))
