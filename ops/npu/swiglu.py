"""SwiGLU with torch_npu."""

from __future__ import annotations

import torch
import torch_npu


def swiglu(gate_up: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``ds_npu.ops.swiglu``, one kernel forward and one backward (aclnnSwiGlu, aclnnSwiGluGrad)."""
    y: torch.Tensor = torch_npu.npu_swiglu(gate_up, dim)
    return y
