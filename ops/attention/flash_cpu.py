"""torch's flash attention on the CPU, for what it supports: no dropout; a full or a causal mask."""

from __future__ import annotations

import torch

from ds_npu.ops.attention.mask import Band

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def serves(q_BNSD: torch.Tensor, k_BNSD: torch.Tensor, band: Band) -> bool:
    """Whether torch's kernel computes attention within ``band``, of which every bound hides some key."""
    if q_BNSD.device.type != "cpu" or q_BNSD.dtype not in DTYPES or 0 in (*q_BNSD.shape, *k_BNSD.shape):
        return False
    return band in (Band(None, None), Band(None, 0))


def forward(
    q_BNSD: torch.Tensor, k_BNSD: torch.Tensor, v_BNSD: torch.Tensor, band: Band, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [B, N, S, D] and lse [B, N, S]; fewer heads of key and value are not repeated."""
    width = max(q_BNSD.shape[3], v_BNSD.shape[3])
    padded = [_padded(x, width) for x in (q_BNSD, k_BNSD, v_BNSD)]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(*padded, 0.0, band.high is not None, scale=scale)
    return out[..., : v_BNSD.shape[3]], lse


def backward(
    dout_BNSD: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    result: tuple[torch.Tensor, torch.Tensor],
    band: Band,
    scale: float,
) -> list[torch.Tensor]:
    """The gradients of ``inputs`` from the gradient of out, and (out, lse)."""
    widths = [x.shape[3] for x in inputs]
    q, k, v, dout, out = (_padded(x, max(widths)) for x in (*inputs, dout_BNSD, result[0]))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients = flash(dout, q, k, v, out, result[1], 0.0, band.high is not None, scale=scale)
    return [gradient[..., :width] for gradient, width in zip(gradients, widths, strict=True)]


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    # torch's kernel needs one width; further zeros change neither the scores nor the part of out that is kept.
    return x if x.shape[3] == width else torch.nn.functional.pad(x, (0, width - x.shape[3]))
