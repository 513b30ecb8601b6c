"""Conditions of torch_npu's matrix products fused with a collective; the kernel calls are in ops.npu."""

from __future__ import annotations

import functools

import torch

from ds_npu import capability
from ds_npu.capability import Unavailable

KERNELS = ("npu_all_gather_base_mm", "npu_mm_reduce_scatter_base")
DTYPES = (torch.float16, torch.bfloat16)
RANKS = (2, 4, 8)
"""Group sizes that every NPU with these kernels supports; an A3 supports 16 and 32, too."""
INNER = range(256, 65535)


def why_unavailable() -> Unavailable | None:
    """Why this machine has no such kernel; None if it has. Starts the Ascend runtime."""
    state = capability.torch_npu_state()
    return capability.missing_functions(KERNELS) if state.usable else Unavailable(state.reason, state.advice)


@functools.cache
def unmet(device_type: str, dtypes: tuple[torch.dtype, torch.dtype], inner: int, ranks: int) -> str | None:
    """Why no fused kernel multiplies [M, inner] with [inner, N], of ``dtypes``, over ``ranks``; None if one does.

    The answer is cached at a layer's first step. Source: op-plugin, docs/context/
    torch_npu-npu_all_gather_base_mm.md and torch_npu-npu_mm_reduce_scatter_base.md.
    """
    if device_type != "npu":
        return f"the tensors are on {device_type}; the kernels are for NPUs"
    if ranks not in RANKS:
        return f"the group has {ranks} ranks; the kernels are for 2, 4 or 8"
    if dtypes[0] not in DTYPES or dtypes[1] != dtypes[0]:
        return f"{dtypes[0]} is multiplied with {dtypes[1]}; the kernels take two torch.float16 or two torch.bfloat16"
    if inner not in INNER:
        return f"the inner dimension is {inner}; the kernels take {INNER.start} to {INNER.stop - 1}"
    return None
