"""Muon in one process and float64, in another way than ds_npu: by singular values, which its iteration only maps.

Weights, momenta and Adam's moments are whole. Order of a step: clip by the norm of all gradients, momentum (Nesterov),
orthogonalise, decay, step.
"""

from __future__ import annotations

import math

import torch
from torch import nn

JORDAN = ((3.4445, -4.7750, 2.0315),) * 5
MUON_LR, ADAM_LR, MOMENTUM, DECAY = 0.02, 0.01, 0.9, 0.1
OPTIMIZER = {
    "type": "Muon",
    "params": {
        "muon_lr": MUON_LR,
        "adam_lr": ADAM_LR,
        "momentum": MOMENTUM,
        "weight_decay": DECAY,
        "betas": [0.9, 0.95],
        "eps": 1e-10,
        "torch_adam": True,
    },
}


def is_muon(name: str, weight: nn.Parameter) -> bool:
    return weight.dim() >= 2 and not any(word in name.lower() for word in ("embed", "lm_head"))


def orthogonal(x: torch.Tensor, coefficients=JORDAN) -> torch.Tensor:
    """Each of the matrices of ``x``, [..., rows, columns], with its singular values mapped by the polynomials."""
    u, s, vh = torch.linalg.svd(x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7), full_matrices=False)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return u * s.unsqueeze(-2) @ vh


def aspect(rows: int, columns: int) -> float:
    return math.sqrt(max(1.0, rows / columns))


def moonlight(rows: int, columns: int) -> float:
    return 0.2 * math.sqrt(max(rows, columns))


class WholeMuon:
    """Steps all weights of ``model``; ``heads``: rows of a matrix by the end of a weight's name, all rows otherwise."""

    def __init__(self, model: nn.Module, heads=None, scale=aspect, coefficients=JORDAN, eps=1e-10) -> None:
        self.named = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.heads, self.scale, self.coefficients = heads or {}, scale, coefficients
        self.momenta = {name: torch.zeros_like(each) for name, each in self.named.items() if is_muon(name, each)}
        others = [each for name, each in self.named.items() if not is_muon(name, each)]
        settings = {"lr": ADAM_LR, "betas": (0.9, 0.95), "eps": eps, "weight_decay": DECAY}
        self.adam = torch.optim.AdamW(others, **settings) if others else None

    @torch.no_grad()
    def step(self, clip: float = 0.0) -> float:
        """Step by the gradients that there are; returns their norm from before they are clipped."""
        norm = torch.cat([each.grad.flatten() for each in self.named.values()]).norm()
        if clip:
            for each in self.named.values():
                each.grad.mul_((clip / (norm + 1e-6)).clamp(max=1))
        if self.adam is not None:
            self.adam.step()
        for name, momentum in self.momenta.items():
            weight = self.named[name]
            momentum.mul_(MOMENTUM).add_(weight.grad, alpha=1 - MOMENTUM)
            blend = (1 - MOMENTUM) * weight.grad + MOMENTUM * momentum
            weight.mul_(1 - MUON_LR * DECAY).sub_(MUON_LR * self._update(name, blend))
        for each in self.named.values():
            each.grad = None
        return float(norm)

    def _update(self, name: str, blend: torch.Tensor) -> torch.Tensor:
        rows = next((rows for end, rows in self.heads.items() if name.endswith(end)), blend.shape[-2])
        parts = blend.unflatten(-2, (-1, rows))
        return (orthogonal(parts, self.coefficients) * self.scale(rows, blend.shape[-1])).reshape(blend.shape)
