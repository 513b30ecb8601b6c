"""Adam and AdamW over a list of tensors, in place."""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ds_npu.operator_costs import adamw_cost
from ds_npu.ops.operator import Operator
from ds_npu.ops.precision import accumulation_dtype

_FLAGS: MutableMapping[torch.Tensor, tuple[int, bool]] = WeakIdKeyDictionary()
"""The version at which each overflow flag was read, and whether it was set then."""


@dataclass(frozen=True)
class AdamStep:
    """The hyperparameters of one step, and its number. Raises ValueError for a step below 1."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int | None
    """Number of the step, from 1; None: no bias correction."""
    decoupled: bool = True
    """True (AdamW): the decay scales the parameter. False (Adam): it is added to the gradient."""

    def __post_init__(self) -> None:
        if self.step is not None and self.step < 1:
            raise ValueError(f"Adam's step is {self.step}; it counts from 1")

    def corrections(self) -> tuple[float, float]:
        """The bias corrections: divisors of the first and the second moment."""
        return (1.0, 1.0) if self.step is None else (1 - self.betas[0] ** self.step, 1 - self.betas[1] ** self.step)


def overflowed(flag: torch.Tensor | None) -> bool:
    """Whether ``flag``, of one element, is not 0; False without a flag.

    The host waits for the device to read it, so it is read again only after it was written.
    """
    if flag is None:
        return False
    seen = _FLAGS.get(flag)
    if seen is None or seen[0] != flag._version:
        seen = _FLAGS[flag] = (flag._version, bool(flag.item()))
    return seen[1]


@torch.no_grad()
def reference(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    numbers: AdamStep,
    overflow: torch.Tensor | None = None,
) -> None:
    """m = β₁m + (1-β₁)g; v = β₂v + (1-β₂)g²; p = p - lr·decay·p - lr · m/c₁ / (sqrt(v/c₂) + eps), c = 1 - βˢᵗᵉᵖ.

    Four lists of equal length, of tensors of any shape on one device; each tensor is computed in float32 (float64 for
    float64) and rounded once. Nothing is changed where ``overflow`` (one element) is not 0.
    Sources: Kingma and Ba 2015, arXiv:1412.6980; Loshchilov and Hutter 2019, arXiv:1711.05101.
    """
    if overflowed(overflow):
        return
    beta1, beta2 = numbers.betas
    correction1, correction2 = numbers.corrections()
    shrink = 1 - numbers.lr * numbers.weight_decay if numbers.decoupled else 1.0
    for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        dtype = accumulation_dtype(param.dtype)
        p, g, m, v = (tensor.to(dtype) for tensor in (param, grad, exp_avg, exp_avg_sq))
        g = g if numbers.decoupled else g + numbers.weight_decay * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g.square()
        update = m / (v.sqrt() / math.sqrt(correction2) + numbers.eps)
        param.copy_(p * shrink - numbers.lr / correction1 * update)
        exp_avg.copy_(m)
        exp_avg_sq.copy_(v)


def sample(dtype: torch.dtype) -> tuple[object, ...]:
    generator = torch.Generator().manual_seed(1)
    lists = [[torch.randn(size, generator=generator).to(dtype) for size in (7, 64)] for _ in range(4)]
    lists[3] = [tensor.abs() for tensor in lists[3]]
    return *lists, AdamStep(lr=0.05, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1, step=3)


adamw_ = Operator("adamw", reference, kernel="ds_npu.ops.npu.adamw:adamw_", sample=sample, cost=adamw_cost)
