"""A factor for ZeRO-3: with a context axis its reduce-scatter averages over it, where ZeRO-0, 1 and 2 sum.

DeepSpeed's convention is that context peers return shares of a loss, so gradients are summed over cp and averaged
over dp. ``DeepSpeedZeroOptimizer_Stage3.__avg_scatter_grads`` divides by dp x cp (through
``reduce_scatter_coalesced``), while its all-reduce twin and the other stages divide by dp (DeepSpeed 0.19.8
runtime/zero/stage3.py:1912 against :1878; upstream issues 5555, 6841).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

METHOD = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"


def restore_sequence_factor(optimizer: Any, context_size: int) -> None:
    """Make ``optimizer``'s reduce-scatter sum over the ``context_size`` ranks of cp. Changes this instance only.

    Raises RuntimeError where the method that is corrected does not exist.
    """
    original = inspect.getattr_static(type(optimizer), METHOD, None)
    if original is None:
        raise RuntimeError(
            f"{type(optimizer).__name__} has no {METHOD}, which ds_npu corrects where parallel.context > 1: this "
            "DeepSpeed is not one of the supported versions"
        )

    def summed_over_context(params: list[torch.nn.Parameter], dtype: torch.dtype) -> list[torch.Tensor]:
        partitions: list[torch.Tensor] = original(optimizer, params, dtype)
        return [partition.mul_(context_size) for partition in partitions]

    setattr(optimizer, METHOD, summed_over_context)
