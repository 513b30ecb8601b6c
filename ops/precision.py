"""The dtype in which sums are accumulated."""

from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are summed: float32, or ``dtype`` where that is wider (float64)."""
    return torch.promote_types(dtype, torch.float32)


def for_accumulation(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the accumulation dtype; itself where it has that already."""
    return x.to(accumulation_dtype(x.dtype))
