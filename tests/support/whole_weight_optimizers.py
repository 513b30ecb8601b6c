"""Optimizers of a client that read more than each element, in a few lines."""

from __future__ import annotations

import torch


class Lamb(torch.optim.Optimizer):
    """Steps by the norms of a weight and of its gradient, as LARS and Lamb do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(group["lr"] * weight.norm() / weight.grad.norm() * weight.grad)


class Prodigy(torch.optim.Optimizer):
    """Steps by the norm of all gradients of its rank."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        weights = [weight for group in self.param_groups for weight in group["params"]]
        norm = torch.stack([weight.grad.norm() for weight in weights]).norm()
        for weight in weights:
            weight.sub_(0.1 / norm * weight.grad)
