"""Linear attention and its convolution token by token, in plain PyTorch: what chunks and ranks are compared with."""

from __future__ import annotations

import torch

from ds_npu.ops.linear_attention import Recurrence


def recurrent(
    tokens: Recurrence, segments_BS: torch.Tensor | None = None, state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs, the last state): the state at each token from the one before, zero where a segment begins."""
    q_BSHK, k_BSHK, v_BSHV, decay_BSH, beta_BSH = tokens
    if state is None:
        state = q_BSHK.new_zeros(*q_BSHK.shape[::2], q_BSHK.shape[3], v_BSHV.shape[3])
    outputs = []
    for t in range(q_BSHK.shape[1]):
        if segments_BS is not None and t:
            goes_on = segments_BS[:, t] == segments_BS[:, t - 1]
            state = torch.where(goes_on[:, None, None, None], state, 0)
        q, k, v = q_BSHK[:, t], k_BSHK[:, t], v_BSHV[:, t]
        state = state * decay_BSH[:, t].exp()[..., None, None]
        if beta_BSH is not None:
            v = (v - torch.einsum("bhkv,bhk->bhv", state, k)) * beta_BSH[:, t, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k, v)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q))
    return torch.stack(outputs, 1), state


def convolved(
    x_BSC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    segments_BS: torch.Tensor | None = None,
    halo_BTC: torch.Tensor | None = None,
) -> torch.Tensor:
    """The causal convolution, sample by sample, token by token and tap by tap."""
    width = weight_CW.shape[1]
    samples = []
    for b in range(len(x_BSC)):
        tokens = []
        for t in range(x_BSC.shape[1]):
            total = torch.zeros_like(x_BSC[b, t]) if bias_C is None else bias_C
            for back in range(width):
                source = t - back
                within = segments_BS is None or segments_BS[b, max(source, 0)] == segments_BS[b, t]
                if source >= 0 and within:
                    total = total + weight_CW[:, width - 1 - back] * x_BSC[b, source]
                elif source < 0 and within and halo_BTC is not None:
                    total = total + weight_CW[:, width - 1 - back] * halo_BTC[b, source]
            tokens.append(total)
        samples.append(torch.stack(tokens))
    return torch.stack(samples)


def drawn_inputs(batch: int, length: int, delta: bool, seed: int = 1, heads: int = 3) -> Recurrence:
    """In float64, keys of length 1, as leaves that require gradients; with beta if ``delta``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(batch, length, heads, *shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(4), torch.nn.functional.normalize(normal(4), dim=-1), normal(5)
    decay, beta = -normal().exp(), normal().sigmoid() if delta else None
    return Recurrence(*(x if x is None else x.requires_grad_() for x in (q, k, v, decay, beta)))
