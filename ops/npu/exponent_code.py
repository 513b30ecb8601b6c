"""The lossless code of floating-point numbers with torch_npu; see ``ds_npu.ops.exponent_code``."""

from __future__ import annotations

import torch
import torch_npu


def mapped_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """[nbytes] uint8 in host memory that is mapped to ``device``; raises MemoryError where the host has none left."""
    try:
        made: torch.Tensor = torch_npu.empty_with_swapped_memory([nbytes], dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise MemoryError(
            f"out of memory of the host: {nbytes:,} bytes could not be pinned and mapped to {device}. What to do: more "
            "memory for this machine or container, a higher limit of locked memory (ulimit -l), or ds_npu.swap without "
            "compress, which needs less of it"
        ) from error
    return made


def hans_encode(
    x: torch.Tensor, counts: torch.Tensor, fixed: torch.Tensor, mantissa: torch.Tensor, overflow: torch.Tensor
) -> None:
    """Count the highest bytes of ``x``, and write its code (aclnnHansEncode, each core's part at its own offset)."""
    # The kernel sorts the counts as float32, and old contents may be its NaN.
    torch_npu.npu_hans_encode(x, True, False, out=(counts.zero_(), mantissa, fixed, overflow))


def hans_decode(
    out: torch.Tensor, counts: torch.Tensor, fixed: torch.Tensor, mantissa: torch.Tensor, overflow: torch.Tensor
) -> None:
    """Write the numbers of a code into ``out`` (aclnnHansDecode)."""
    torch_npu.npu_hans_decode(mantissa, fixed, overflow, counts, False, out=out)
