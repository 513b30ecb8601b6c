"""RMS norm with torch_npu."""

from __future__ import annotations

import torch
import torch_npu


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """``ds_npu.ops.rms_norm``, one kernel forward and one backward (aclnnRmsNorm, aclnnRmsNormGrad)."""
    gamma = weight.to(x.dtype)
    y: torch.Tensor = torch_npu.npu_rms_norm(x, gamma, eps)[0]
    return y
