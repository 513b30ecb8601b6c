"""Rotary position embedding with torch_npu."""

from __future__ import annotations

import math

import torch
import torch_npu

from ds_npu.ops import rotary as operator

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
        return operator.reference(x, cos, sin, interleaved)
    x4, cos4, sin4 = (tensor.reshape((1,) * (4 - tensor.dim()) + tensor.shape) for tensor in (x, cos, sin))
    empty = _dim_for_batch(x4, cos4)
    x4, cos4, sin4 = (tensor.transpose(0, empty) for tensor in (x4, cos4, sin4))
    if cos4.shape != sin4.shape or not _fits(x4, cos4, interleaved, cos.requires_grad or sin.requires_grad):
        return operator.reference(x, cos, sin, interleaved)
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
