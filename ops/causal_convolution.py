"""The short causal convolution of linear attention: each channel by itself, over a token and those just before it."""

from __future__ import annotations

import torch
from torch.nn import functional


def causal_convolution(
    x_BSC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None = None,
    segments_BS: torch.Tensor | None = None,
    halo_BTC: torch.Tensor | None = None,
) -> torch.Tensor:
    """y_t = bias + sum over w of weight[W - 1 - w] x_{t - w}, w = 0 ... W - 1; [B, S, C], of x's dtype.

    ``halo``: the W - 1 tokens before the first one (None: zeros), of its document. ``segments`` number documents in
    ascending order: no token sees one of another document. Source: Dao-AILab, causal-conv1d.
    """
    width, length = weight_CW.shape[1], x_BSC.shape[1]
    halo = x_BSC.new_zeros(x_BSC.shape[0], width - 1, x_BSC.shape[2]) if halo_BTC is None else halo_BTC
    whole = torch.cat([halo, x_BSC], 1)
    if segments_BS is None:
        return functional.conv1d(whole.mT, weight_CW[:, None], bias_C, groups=whole.shape[2]).mT
    numbers = torch.cat([segments_BS[:, :1].expand(-1, width - 1), segments_BS], 1)
    total = x_BSC.new_zeros(()) if bias_C is None else bias_C
    for tap in range(width):
        seen = numbers[:, tap : tap + length] == segments_BS
        total = total + whole[:, tap : tap + length] * seen[..., None] * weight_CW[:, tap]
    return total
