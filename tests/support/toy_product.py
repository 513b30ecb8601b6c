"""A toy kind of product, which rounds to 8 bits, and the same in plain PyTorch, written in another way."""

from __future__ import annotations

import torch
from torch.nn import functional

from ds_npu.ops.grouped_matmul import grouped_matmul

STEP = 1 / 32


def rounded(x: torch.Tensor) -> torch.Tensor:
    """To the nearest of 256 numbers, between two of them to the larger."""
    return (x / STEP + 0.5).floor().clamp(-128, 127) * STEP


class Rounded:
    """Activations and weights are rounded; gradients are not."""

    def forward(self, x, weight, counts=None):
        return multiply(rounded(x), rounded(weight), counts)

    def input_gradient(self, dy, weight, counts=None):
        return multiply(dy, rounded(weight), counts)

    def weight_gradient(self, x, dy, plain):
        return plain(rounded(x), dy)


def multiply(x, weight, counts):
    return torch.matmul(x, weight) if counts is None else grouped_matmul(x, weight, counts)


class Nearest(torch.autograd.Function):
    """The nearest of the 256 numbers, found by search; its gradient passes unchanged."""

    @staticmethod
    def forward(ctx, x):
        numbers = torch.arange(-128, 128, dtype=x.dtype) * STEP
        return numbers[torch.bucketize(x, (numbers[1:] + numbers[:-1]) / 2, right=True)]

    @staticmethod
    def backward(ctx, dy):
        return dy


def reference_linear(x, weight, bias=None):
    """``functional.linear`` of rounded operands."""
    return functional.linear(Nearest.apply(x), Nearest.apply(weight), bias)
