"""ZeRO 1 and 2 reduce the gradients of a float64 model with experts in float64.

With experts DeepSpeed wants its reduce-scatter (0.19.8 runtime/zero/stage_1_and_2.py, _configure_moe_settings), which
ZeRO 2 accepts for three dtypes only, and which rounds to float32 where there are context ranks (allreduce_bucket).
What it does takes any dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_npu.zero_ext.method_wraps import MethodLevel, wrap_method


def reduce_in_float64(optimizer: Any) -> None:
    """Make ``optimizer``, which was made for gradients that travel in another dtype, reduce in float64."""
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
