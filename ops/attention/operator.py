"""The public functions of attention: with autograd, and its forward and backward alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.autograd.function import once_differentiable

from ds_npu.operator_costs import attention_backward_cost, attention_forward_cost
from ds_npu.ops.attention import reference
from ds_npu.ops.attention.document import Inputs
from ds_npu.ops.attention.mask import CAUSAL
from ds_npu.ops.attention.options import Options
from ds_npu.ops.attention.reference import Dropout, Result
from ds_npu.ops.attention.sinks import gradient_of_sinks, merge_sinks
from ds_npu.ops.autograd import Context, applied
from ds_npu.ops.operator import Operator, sample_numbers


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out = dropout(softmax(mask(q kᵀ · scale))) v, and the lse of the scores; both have gradients.

    By ``options.layout``: q [B, S, N, D] (BSND), [B, N, S, D] (BNSD), [S, B, N·D] (SBH) or [T, N, D] (TND, packed
    documents); k and v alike, with their own S, with fewer heads that divide N, v with a width of its own. Out is laid
    out as q, with v's width and q's dtype; lse is [B, N, S] (TND: [T, N]), float32, or float64 for float64, which are
    also the accumulation dtypes. A row that the mask leaves no key has out 0 and lse -inf. In ``options.mask`` True is
    masked. With ``options.sinks`` lse counts them, and has no gradient. Raises ValueError, with the shapes, for tensors
    that do not go together.
    """
    options = options or Options()
    sinks = options.sinks
    heads = q.shape[2 if options.layout == "BSND" else 1]
    if sinks is not None and (options.layout == "SBH" or sinks.shape != (heads,)):
        raise ValueError(f"attention: sinks {list(sinks.shape)} for q {list(q.shape)} in layout {options.layout}")
    return _attend(q, k, v, replace(options, sinks=None), sinks)


class _AttentionContext(Context):
    options: Options
    dropout: Dropout | None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _AttentionContext,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: Options,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Autocast must not lower what is computed in float32.
        with torch.autocast(q.device.type, enabled=False):
            out, lse, ctx.dropout = attention_forward(q, k, v, options)
            if sinks is not None:
                out, lse = merge_sinks(out, lse, sinks, options.layout)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _AttentionContext, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 5
        if sinks is not None and dlse is not None:
            raise RuntimeError("attention: lse has no gradient where there are sinks")
        dout = torch.zeros_like(out) if dout is None else dout
        result = Result(out, lse, ctx.dropout)
        with torch.autocast(q.device.type, enabled=False):
            of_sinks = None if sinks is None else gradient_of_sinks(dout, out, lse, sinks, ctx.options.layout)
            return (*attention_backward(dout, Inputs(q, k, v), result, ctx.options, dlse), None, of_sinks)


_attend = applied(_Attend, _Attend.forward)


def _sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Options]:
    q, k, v = sample_numbers(dtype, *((2, 24, heads, 32) for heads in (4, 2, 2)))
    return q, k, v, Options(mask=CAUSAL)


def _backward_sample(dtype: torch.dtype) -> tuple[torch.Tensor, Inputs, Result, Options]:
    q, k, v, options = _sample(dtype)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    return dout, Inputs(q, k, v), reference.forward(q, k, v, options), options


attention_forward = Operator(
    "attention_forward",
    reference.forward,
    kernel="ds_npu.ops.npu.attention:forward",
    needs=("npu_fusion_attention",),
    sample=_sample,
    cost=attention_forward_cost,
)
"""``(q, k, v, options) -> Result(out, lse, dropout)``, without autograd: for merging several such results."""

attention_backward = Operator(
    "attention_backward",
    reference.backward,
    kernel="ds_npu.ops.npu.attention:backward",
    needs=("npu_fusion_attention_grad",),
    sample=_backward_sample,
    cost=attention_backward_cost,
)
"""``(dout, Inputs(q, k, v), Result, options, dlse=None) -> Inputs`` of gradients; ``Result`` may be a merged one."""
