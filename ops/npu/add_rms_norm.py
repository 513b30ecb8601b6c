"""Addition and RMS norm with torch_npu."""

from __future__ import annotations

import torch
import torch_npu
from torch.autograd.function import once_differentiable

from ds_npu.ops.autograd import Context, applied
from ds_npu.ops.npu.rms_norm import rms_norm


class _AddRmsNorm(torch.autograd.Function):
    """npu_add_rms_norm, which has no gradient in torch_npu, with the gradient of the norm (aclnnRmsNormGrad)."""

    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, rstd, total = torch_npu.npu_add_rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context, grad_y: torch.Tensor | None, grad_total: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        total, weight, rstd = ctx.saved_tensors
        grad, grad_weight = grad_total, None
        if grad_y is not None:
            grad, grad_weight = torch.ops.npu.npu_rms_norm_backward(grad_y, total, weight, rstd)
            grad_weight = grad_weight.to(weight.dtype)
            grad = grad if grad_total is None else grad + grad_total
        return grad, grad, grad_weight, None


_add_rms_norm = applied(_AddRmsNorm, _AddRmsNorm.forward)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``ds_npu.ops.add_rms_norm``, one kernel forward; in two where the dtypes or shapes of the arguments differ."""
    if x.dtype == residual.dtype == weight.dtype and x.shape == residual.shape:
        return _add_rms_norm(x, residual, weight, eps)
    total = x + residual
    return rms_norm(total, weight, eps), total
