"""Inputs for the operators of ds_npu.ops, and what each computes, written down a second time.

A case's ``formula`` says it in another way than the operator's own reference does, for float64; ``plain`` is what a
model would write, and its error in a low precision is what an operator's error is measured by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from ds_npu.acceptance.operator_call import Maker, drawn
from ds_npu.acceptance.operator_cases import SMALL_CALLS, cross_entropy_args, rotary_args, softmax_args
from ds_npu.ops.layers import add_rms_norm, cross_entropy, rms_norm, rotary, softmax, swiglu


@dataclass(frozen=True)
class Case:
    """One call of an operator; ``name`` is the test's id, ``kernels`` the functions of torch_npu it must call."""

    name: str
    operator: Any
    args: Maker
    formula: Callable[..., Any]
    plain: Callable[..., Any]
    kernels: tuple[str, ...]


def outcome(function: Callable[..., Any], args: Sequence[Any]) -> list[torch.Tensor]:
    """The results of ``function``, then the gradients at all arguments that require one, for fixed gradients above."""
    results = [x for x in pytree.tree_leaves(function(*args)) if isinstance(x, torch.Tensor)]
    wanted = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
    upstream = [drawn(*x.shape, seed=90 + i, dtype=x.dtype, gradient=False).to(x.device) for i, x in enumerate(results)]
    return [*(x.detach() for x in results), *torch.autograd.grad(results, wanted, upstream)]


def error(found: torch.Tensor, true: torch.Tensor) -> float:
    """The largest difference."""
    assert found.shape == true.shape, (found.shape, true.shape)
    return float((found.cpu().double() - true).abs().max())


def rms_formula(x, weight, eps, offset=0.0):
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (weight + offset) * x / torch.sqrt(length * length / x.shape[-1] + eps)


def add_rms_formula(x, residual, weight, eps):
    return rms_formula(residual + x, weight, eps), residual + x


def add_rms_plain(x, residual, weight, eps):
    return functional.rms_norm(x + residual, weight.shape, weight, eps), x + residual


def rms_plain(x, weight, eps, offset=0.0):
    return functional.rms_norm(x, weight.shape, weight + offset, eps)


def swiglu_formula(gate_up, dim=-1):
    half = gate_up.shape[dim] // 2
    gate, up = gate_up.narrow(dim, 0, half), gate_up.narrow(dim, half, half)
    return gate * up / (1 + torch.exp(-gate))


def swiglu_plain(gate_up, dim=-1):
    gate, up = gate_up.chunk(2, dim)
    return functional.silu(gate) * up


def paired(x, interleaved):
    """x as complex numbers, one for each pair of dims."""
    half = x.shape[-1] // 2
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    return torch.complex(first, second)


def rotary_formula(x, cos, sin, interleaved=False):
    # In cos and sin both members of a pair have the same angle.
    turned = paired(x, interleaved) * torch.complex(paired(cos, interleaved).real, paired(sin, interleaved).real)
    if interleaved:
        return torch.view_as_real(turned).flatten(-2)
    return torch.cat([turned.real, turned.imag], -1)


def rotary_plain(x, cos, sin, interleaved=False):
    if interleaved:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    return x * cos + turned * sin


def softmax_formula(x, mask=None, scale=1.0):
    scores = x * scale if mask is None else (x * scale).masked_fill(mask, -torch.inf)
    return torch.exp(scores - scores.logsumexp(-1, keepdim=True))


def softmax_plain(x, mask=None, scale=1.0):
    scores = x * scale
    return torch.softmax(scores if mask is None else scores.masked_fill(mask, -torch.inf), -1)


def cross_entropy_formula(logits, targets, ignore_index=-100):
    counted = targets != ignore_index
    chosen = logits.gather(1, targets.where(counted, 0).unsqueeze(1)).squeeze(1)
    return (logits.logsumexp(1) - chosen) * counted


def cross_entropy_plain(logits, targets, ignore_index=-100):
    # In float32 at least, as models do.
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(wide, targets, ignore_index=ignore_index, reduction="none")


RMS = (rms_norm, rms_formula, rms_plain, ("npu_rms_norm",))
ADD_RMS = (add_rms_norm, add_rms_formula, add_rms_plain, ("npu_add_rms_norm",))
ROTARY = (rotary, rotary_formula, rotary_plain, ("npu_rotary_mul",))
SWIGLU = (swiglu, swiglu_formula, swiglu_plain, ("npu_swiglu",))
SOFTMAX = (softmax, softmax_formula, softmax_plain, ("npu_scaled_masked_softmax",))
LOSS = (cross_entropy, cross_entropy_formula, cross_entropy_plain, ("npu_cross_entropy_loss",))


def case(name: str, what: tuple[Any, ...], args: Maker) -> Case:
    return Case(name, what[0], args, *what[1:])


OTHERWISE = {what[0]: what for what in (RMS, ADD_RMS, ROTARY, SWIGLU, SOFTMAX, LOSS)}
CASES = tuple(
    case(call.name, OTHERWISE[call.function], call.args) for call in SMALL_CALLS if call.function in OTHERWISE
)
"""Calls for which there is a kernel: those of ``ds_npu accept``."""

WITHOUT_KERNEL = (
    case("rotary, angles without D's batch", ROTARY, rotary_args((2, 3, 17, 32), (1, 3, 17, 32))),
    case("rotary BSND, interleaved, angles of each row", ROTARY, rotary_args((2, 17, 3, 32), (2, 17, 1, 32), True)),
    case("softmax without a mask", SOFTMAX, softmax_args(2, 3, 32, 64, scale=0.125, masked=False)),
    case("softmax of 31 keys", SOFTMAX, softmax_args(2, 3, 31, 31, scale=0.125)),
    case("no token", LOSS, cross_entropy_args(0, 100, None)),
)
"""Calls that the kernels do not take, and that run all the same."""
