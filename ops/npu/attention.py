"""Attention with torch_npu: npu_fusion_attention and its gradient (aclnnFlashAttentionScore and its VarLen form)."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch_npu

from ds_npu.log import warn_once
from ds_npu.ops.attention import lse_column, reference
from ds_npu.ops.attention.document import Inputs
from ds_npu.ops.attention.mask import Mask
from ds_npu.ops.attention.options import Options, Sizes, kernel_refusal, sizes_of
from ds_npu.ops.attention.reference import Dropout, Result

UNLIMITED = 2**31 - 1
LOWEST, LARGEST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
"""The maximum and the sum that the kernel writes for a row that sees no key."""

WHOLE, LEFT_UP, RIGHT_DOWN, BAND = 1, 2, 3, 4
"""CANN's sparse modes: the mask tensor as it is; causal from the first row and key, and from the last; a band."""

ZEROS_FOR_EMPTY_ROWS = 2
"""CANN's inner_precise: without it a row that the mask tensor hides weighs all keys the same."""


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Result:
    if reason := _refusal(Inputs(q, k, v), options):
        warn_once(f"attention runs without its NPU kernel: {reason}")
        return reference.forward(q, k, v, options)
    sizes = sizes_of(q, k, v, options)
    out, maximum, total, _, seed, offset, numels = torch_npu.npu_fusion_attention(
        q,
        k,
        v,
        sizes.heads,
        options.layout,
        scale=options.scale_of(sizes),
        keep_prob=1 - options.dropout_p,
        **_of_mask(options, sizes, q.device),
    )
    lse = maximum[..., 0] + total[..., 0].log()
    lse = lse.masked_fill_(lse < LOWEST / 2, -torch.inf)
    return Result(out, lse, Dropout(seed, offset, numels, of_kernel=True) if options.dropout_p > 0 else None)


def backward(
    dout: torch.Tensor, inputs: Inputs, result: Result, options: Options, dlse: torch.Tensor | None = None
) -> Inputs:
    """``ds_npu.ops.attention.attention_backward``; with dropout lse can have no gradient (NotImplementedError)."""
    of_reference = result.dropout is not None and not result.dropout.of_kernel
    if of_reference or _refusal(inputs, options):
        return reference.backward(dout, inputs, result, options, dlse)
    if dlse is None:
        return _gradients(dout, inputs, result, options)
    if options.dropout_p > 0:
        raise NotImplementedError(
            "attention on an NPU with dropout: its lse has no gradient; detach it, or use no dropout"
        )
    widened = lse_column.widened(dout, inputs, result, options, dlse)
    if _refusal(widened.inputs, widened.options):
        return reference.backward(dout, inputs, result, options, dlse)
    return lse_column.narrowed(_gradients(*widened), inputs, options)


def _refusal(inputs: Inputs, options: Options) -> str | None:
    if options.mask.ends_q and not _tells_layout():
        return "this torch_npu's npu_fusion_attention has no softmax_layout, which packed documents need"
    return kernel_refusal(*inputs, options)


@functools.cache
def _tells_layout() -> bool:
    """Whether the statistics of packed documents can be had as [T, N, 8], as from torch_npu 2.13."""
    arguments = torch.ops.npu.npu_fusion_attention.default._schema.arguments
    return any(argument.name == "softmax_layout" for argument in arguments)


def _gradients(dout: torch.Tensor, inputs: Inputs, result: Result, options: Options) -> Inputs:
    sizes = sizes_of(*inputs, options)
    empty = result.lse == -torch.inf
    # A weight is exp(score - maximum) / sum: the pair (lse, 1) does as well as the kernel's own, also for a merged lse.
    maximum = result.lse.float().masked_fill(empty, LOWEST)
    total = torch.ones_like(maximum).masked_fill_(empty, LARGEST)
    seed, offset, numels, _ = result.dropout or Dropout(0)
    dq, dk, dv, *_ = torch_npu.npu_fusion_attention_grad(
        *inputs,
        dout.to(inputs.q.dtype),
        sizes.heads,
        options.layout,
        softmax_max=_eightfold(maximum),
        softmax_sum=_eightfold(total),
        attention_in=result.out.to(inputs.q.dtype),
        scale_value=options.scale_of(sizes),
        keep_prob=1 - options.dropout_p,
        seed=seed,
        offset=offset,
        numels=numels,
        **_of_mask(options, sizes, dout.device),
    )
    return Inputs(dq, dk, dv)


def _eightfold(statistic: torch.Tensor) -> torch.Tensor:
    return statistic[..., None].expand(*statistic.shape, 8).contiguous()


def _of_mask(options: Options, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """The arguments that say which keys a row sees. Without a mask tensor the kernel ignores sparse_mode."""
    mask = options.mask
    if mask.dense is not None:
        return {
            "atten_mask": _of_four_dims(mask.dense, sizes),
            "sparse_mode": WHOLE,
            "inner_precise": ZEROS_FOR_EMPTY_ROWS,
        }
    found: dict[str, Any] = {}
    if mask.ends_q:
        # A document without rows has no keys either (``kernel_refusal``), and is left out.
        documents = [one for one in mask.documents(sizes.rows, sizes.keys) if one.rows]
        found["actual_seq_qlen"] = [rows.stop for rows, _ in documents]
        found["actual_seq_kvlen"] = [keys.stop for _, keys in documents]
        found["softmax_layout"] = "TND"
    mode, before, after = _sparse(mask, sizes)
    if mode:
        found |= {"atten_mask": _compressed(device), "sparse_mode": mode, "pre_tockens": before, "next_tockens": after}
    return found


def _sparse(mask: Mask, sizes: Sizes) -> tuple[int, int, int]:
    """CANN's sparse mode (0: no mask) and how many keys a band has before and after, from the last row and key."""
    before, after = mask.before, mask.after
    left_up = mask.from_start and (before, after) == (None, 0)
    if not mask.ends_q:
        low, high = mask.band(sizes.rows, sizes.keys).within(sizes.rows, sizes.keys)
        corner = sizes.keys - sizes.rows
        left_up = (low, high) == (None, 0) and corner != 0
        before = None if low is None else corner - low
        after = None if high is None else high - corner
    if left_up:
        return LEFT_UP, UNLIMITED, UNLIMITED
    if (before, after) == (None, None):
        return 0, UNLIMITED, UNLIMITED
    if (before, after) == (None, 0):
        return RIGHT_DOWN, UNLIMITED, UNLIMITED
    return BAND, UNLIMITED if before is None else before, UNLIMITED if after is None else after


def _of_four_dims(dense: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """``dense`` as [B, N, Sq, Sk]; N is 1 if all heads share it, and B only if all samples and heads do."""
    dense = dense.view(*[1] * (4 - dense.dim()), *dense.shape)
    return dense.expand(1 if dense.shape[:2] == (1, 1) else sizes.batch, dense.shape[1], sizes.rows, sizes.keys)


@functools.cache
def _compressed(device: torch.device) -> torch.Tensor:
    """The mask tensor of every band at any length, made once for each device."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu_(1)
