"""Attention sinks: one learned score for each head that every row sees, without a value.

With L = log(exp lse + exp sink), out is out * exp(lse - L), and L is the lse of the weights. FlashAttention's backward,
which computes weights again from (out, lse), is right for (out * exp(lse - L), L) as it is: a sink is one more key
whose value is 0. Source: Xiao et al. 2023, arXiv:2309.17453; GPT-OSS (transformers ``modeling_gpt_oss.py``).
"""

from __future__ import annotations

import torch

from ds_npu.ops.attention.options import Layout


def merge_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of attention that also sees ``sinks`` [N]; ``lse`` [B, N, S], TND: [T, N].

    ``out`` is laid out as ``layout``, which is not SBH. The result of a row that sees no key remains 0.
    """
    wide = sinks.detach().to(lse.dtype)
    whole = torch.logaddexp(lse, wide if layout == "TND" else wide[:, None])
    kept = (lse - whole).exp()
    kept = kept.transpose(1, 2) if layout == "BSND" else kept
    return (out.to(lse.dtype) * kept[..., None]).to(out.dtype), whole


def gradient_of_sinks(
    dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, layout: Layout
) -> torch.Tensor:
    """The gradient [N] of ``sinks`` from that of ``out``; ``out`` and ``lse`` are results of ``merge_sinks``."""
    shared = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    shared = shared.transpose(1, 2) if layout == "BSND" else shared
    wide = sinks.detach().to(lse.dtype)
    weights = ((wide if layout == "TND" else wide[:, None]) - lse).exp()
    total = -(weights * shared).sum(0 if layout == "TND" else (0, 2))
    return total.to(sinks.dtype)
