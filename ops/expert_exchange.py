"""Conditions of torch_npu's products of experts fused with an all-to-all; the kernel calls are in ops.npu."""

from __future__ import annotations

import functools

import torch

from ds_npu import capability
from ds_npu.capability import Unavailable

KERNELS = ("npu_alltoallv_gmm", "npu_gmm_alltoallv")
A3 = "Ascend910_93"
"""Prefix of torch_npu's names of the chips that have the kernels."""
DTYPES = (torch.float16, torch.bfloat16)
RANKS = (8, 16, 32, 64)
MOST_EXPERTS = 32
"""Experts of one rank."""
MOST_COUNTS = 256
"""Experts of all ranks."""
LEAST_BYTES, MOST_BYTES = 2 * 2**20, 100 * 2**20
"""Bytes that a rank may send or get in one call."""
WIDEST = 65535


def why_not_fused() -> Unavailable | None:
    """Why this machine has no such kernel; None if it has. Starts the Ascend runtime."""
    state = capability.torch_npu_state()
    if not state.usable:
        return Unavailable(state.reason, state.advice)
    if missing := capability.missing_functions(KERNELS):
        return missing
    name: str = torch.get_device_module("npu").get_device_name()
    if name.startswith(A3):
        return None
    return Unavailable(f"CANN has them for Atlas A3 ({A3}*), and this is {name}", "moe.dispatcher 'alltoall'")


@functools.cache
def unmet(
    device_type: str, dtypes: frozenset[torch.dtype], widths: tuple[int, int], experts: int, ranks: int
) -> str | None:
    """Why no fused kernel exchanges rows of ``widths`` (and multiplies) over ``ranks``; None if one does.

    ``experts`` is for one rank. Source: CANN, aclnnAlltoAllvGroupedMatMul.md and aclnnGroupedMatMulAlltoAllv.md.
    """
    if device_type != "npu":
        return f"the tensors are on {device_type}; the kernels are for NPUs"
    if ranks not in RANKS:
        return f"the experts are over {ranks} ranks; the kernels are for 8, 16, 32 or 64"
    if experts > MOST_EXPERTS or experts * ranks > MOST_COUNTS:
        return (
            f"{ranks} ranks have {experts} experts each; the kernels take {MOST_EXPERTS} of a rank, and {MOST_COUNTS} "
            "in all"
        )
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        return f"operands are {', '.join(sorted(map(str, dtypes)))}; the kernels take torch.float16 or torch.bfloat16"
    if max(widths) > WIDEST:
        return f"rows are {max(widths)} wide; the kernels take {WIDEST} at most"
    return None


def unmet_bytes(bytes_of_ranks: list[int]) -> str | None:
    """Why no fused kernel exchanges as many bytes as ranks send or get in one call; None if one does."""
    least, most = min(bytes_of_ranks), max(bytes_of_ranks)
    if least < LEAST_BYTES or most > MOST_BYTES:
        return (
            f"ranks exchange {least:,} to {most:,} bytes in a call; the kernels take {LEAST_BYTES:,} to {MOST_BYTES:,}"
        )
    return None
