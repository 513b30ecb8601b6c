"""RMS norm with torch_npu."""

from __future__ import annotations

import torch
import torch_npu


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """``ds_npu.ops.rms_norm``, one kernel forward and one backward (aclnnRmsNorm, aclnnRmsNormGrad).

    torch_npu's npu_gemma_rms_norm has no gradient (Ascend/op-plugin, op_plugin/config/derivatives.yaml), so the offset
    is added to the weight, in float32, which the kernels take for any dtype of x.
    """
    gamma = weight if weight.dtype in (x.dtype, torch.float32) else weight.float()
    if offset:
        gamma = gamma.float() + offset
    y: torch.Tensor = torch_npu.npu_rms_norm(x, gamma if x.dtype != torch.float32 else gamma.float(), eps)[0]
    return y
