"""Kernels of torch_npu for the layers of a transformer: norms, rotary embedding, SwiGLU, softmax, cross-entropy."""

from __future__ import annotations

import math

import torch
import torch_npu
from torch.autograd.function import once_differentiable

from ds_npu import ops
from ds_npu.ops.autograd import Context, applied


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


# Limits of npu_rotary_mul, by the documentation in torch_npu 2.13 (_op_plugin_docs.py).
LARGEST_D = 895
LARGEST_BROADCAST = 999
LARGEST_BROADCAST_WITH_GRADIENT = 1024


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """``ds_npu.ops.rotary``, one kernel forward and one backward (aclnnRotaryPositionEmbedding and -Grad).

    cos and sin are rounded to x's dtype, which is the only one the kernel takes. Shapes it does not take go to the
    reference: more than four dims, and cos and sin that broadcast over other dims than a layout's batch and heads (or
    over its batch alone, where there is more than one head).
    """
    if x.dim() > 4 or max(cos.dim(), sin.dim()) > x.dim():
        return ops.rotary.reference(x, cos, sin, interleaved)
    x4, cos4, sin4 = (tensor.reshape((1,) * (4 - tensor.dim()) + tensor.shape) for tensor in (x, cos, sin))
    empty = _dim_for_batch(x4, cos4)
    x4, cos4, sin4 = (tensor.transpose(0, empty) for tensor in (x4, cos4, sin4))
    if cos4.shape != sin4.shape or not _fits(x4, cos4, interleaved, cos.requires_grad or sin.requires_grad):
        return ops.rotary.reference(x, cos, sin, interleaved)
    mode = "interleave" if interleaved else "half"
    y: torch.Tensor = torch_npu.npu_rotary_mul(x4, cos4.to(x.dtype), sin4.to(x.dtype), mode)
    return y.transpose(0, empty).reshape(x.shape)


def _dim_for_batch(x4: torch.Tensor, cos4: torch.Tensor) -> int:
    """The dim to which the batch is moved: the kernel takes cos without a batch only where it has no heads either.

    One head (multi-query attention, MLA's keys) is a dim of size 1, which can be swapped with the batch.
    """
    if cos4.shape[0] != 1 or cos4.shape[1:] != x4.shape[1:]:
        return 0
    return next((dim for dim in (1, 2) if x4.shape[dim] == 1), 0)


def _fits(x: torch.Tensor, cos: torch.Tensor, interleaved: bool, angle_gradient: bool) -> bool:
    # BNSD, BSND and SBND all end in D; cos may broadcast over N, or over N and B, of the other three dims.
    sizes = list(zip(x.shape[:3], cos.shape[:3], strict=True))
    broadcast = [i for i, (size, own) in enumerate(sizes) if own == 1 and size != 1]
    held = [i for i, (_, own) in enumerate(sizes) if own != 1]
    if x.shape[3] != cos.shape[3] or x.shape[3] > LARGEST_D or broadcast in ([0], [0, 1, 2]):
        return False
    repeats = [x.shape[i] for i in broadcast]
    if interleaved:
        return len(held) <= 1 and math.prod(repeats) <= LARGEST_BROADCAST
    if angle_gradient and math.prod(repeats) > LARGEST_BROADCAST_WITH_GRADIENT:
        return False
    return max(repeats, default=1) <= LARGEST_BROADCAST


def swiglu(gate_up: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``ds_npu.ops.swiglu``, one kernel forward and one backward (aclnnSwiGlu, aclnnSwiGluGrad)."""
    y: torch.Tensor = torch_npu.npu_swiglu(gate_up, dim)
    return y


def softmax(x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
    """``ds_npu.ops.softmax``, one kernel forward and one backward where S and T are 32, 64, 96 … 4096.

    The kernel replaces masked scores by -10000, so a score below that is no smaller than a masked one. Without a
    mask, and with other sizes, the reference is used (npu_scaled_masked_softmax in torch_npu 2.13, _op_plugin_docs.py).
    """
    is_aligned = all(32 <= size <= 4096 and size % 32 == 0 for size in x.shape[2:])
    if mask is None or not is_aligned or not x.dim() == mask.dim() == 4 or mask.shape[2:] != x.shape[2:]:
        return ops.softmax.reference(x, mask, scale)
    y: torch.Tensor = torch_npu.npu_scaled_masked_softmax(x, mask, scale, False)
    return y


LARGEST_TOKENS = 200_000
"""Most tokens, by the documentation of npu_cross_entropy_loss in torch_npu 2.13 (_op_plugin_docs.py)."""


def cross_entropy(logits_TV: torch.Tensor, targets_T: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """``ds_npu.ops.cross_entropy``, one kernel forward and one backward (aclnnCrossEntropyLoss and -Grad).

    The kernel rounds the losses and all log-probabilities, from which it makes the gradient, to the dtype of its input,
    so it gets float32. It takes a negative ``ignore_index`` for none at all, so ignored tokens get a target here.
    """
    if not 0 < logits_TV.shape[0] <= LARGEST_TOKENS:
        return ops.cross_entropy.reference(logits_TV, targets_T, ignore_index)
    ignored_T = targets_T == ignore_index
    losses_T: torch.Tensor = torch_npu.npu_cross_entropy_loss(
        logits_TV.float(), targets_T.masked_fill(ignored_T, 0), reduction="none"
    )[0]
    return losses_T.masked_fill(ignored_T, 0.0)
