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


class LargeLamb(Lamb):
    """Steps so only where both dims are large, as some do that factor their moments."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                size = weight.norm() / weight.grad.norm() if weight.dim() > 1 and min(weight.shape) >= 32 else 1
                weight.sub_(group["lr"] * size * weight.grad)


class Blocks(torch.optim.Optimizer):
    """Keeps a momentum of 8 bits in blocks with a scale each, where a weight has ``least`` elements or more."""

    def __init__(self, params, lr=0.1, least=0):
        super().__init__(params, {"lr": lr})
        self.least = least

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                kept = self.state[weight]
                momentum = 0.9 * kept.get("momentum", torch.zeros_like(weight)) + weight.grad
                weight.sub_(group["lr"] * momentum)
                if weight.numel() >= self.least:
                    blocks = momentum.reshape(-1, min(256, weight.numel()))
                    scale = blocks.abs().amax(dim=1, keepdim=True)
                    momentum = ((blocks / scale * 127).round() / 127 * scale).view_as(weight)
                kept["momentum"] = momentum


class Chosen(torch.optim.SGD):
    """Steps by the norm of the gradient of the weights that it is given as ``whole``, which it keeps or not."""

    def __init__(self, params, lr=0.1, whole=(), keeps=True):
        super().__init__(params, lr=lr)
        self._chosen = {id(weight) for weight in whole}
        if keeps:
            self.whole, self.keeps = whole, keeps

    @torch.no_grad()
    def step(self):
        for weight in (each for group in self.param_groups for each in group["params"] if id(each) in self._chosen):
            weight.grad /= weight.grad.norm()
        super().step()


class Trains(torch.optim.SGD):
    """Steps only after ``train``, as optimizers that are free of schedules do."""

    is_training = False

    def train(self):
        self.is_training = True

    def step(self):
        if not self.is_training:
            raise RuntimeError("not in train mode")
        super().step()
