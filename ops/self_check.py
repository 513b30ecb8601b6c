"""Comparison of a kernel with its reference, forward and backward, on one small input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

Sample = Callable[[torch.dtype], tuple[Any, ...]]

# CANN accepts an operator whose largest relative error is below 10 * 2**-7 in bf16, 10 * 2**-10 in fp16 and
# 10 * 2**-13 in float32, where the device's exponentials and roots are less exact than its sums (cann/ops-math,
# experimental/math/fused_mul_add_n/tests/st/torch/compare.py). Here it is relative to the largest value.
ROUNDINGS, FLOAT32_UNIT = 10.0, 2.0**-13


def difference(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    sample: tuple[Any, ...],
    dtype: torch.dtype,
    device: torch.device | str,
) -> str | None:
    """How ``kernel`` on ``device`` differs from ``reference`` in float64 on the CPU; None if by rounding only.

    It compares the results, the arguments afterwards (an operator may work in place) and the gradients of those
    arguments that require one. ``dtype`` says how much rounding is allowed.
    """
    try:
        found = outcome(kernel, pytree.tree_map_only(torch.Tensor, lambda x: _leaf(x, x.dtype, device), sample))
    except RuntimeError as error:
        return f"in {dtype} it raises {type(error).__name__}: {str(error).strip().splitlines()[0]}"
    exact = pytree.tree_map_only(
        torch.Tensor, lambda x: _leaf(x, torch.float64 if x.is_floating_point() else x.dtype, "cpu"), sample
    )
    expected = outcome(reference, exact)
    if list(found) != list(expected):
        return f"in {dtype} it gives {', '.join(found)}, and the reference {', '.join(expected)}"
    for name, true in expected.items():
        mine = found[name]
        if mine.shape != true.shape:
            return f"in {dtype} {name} has shape {tuple(mine.shape)}, and {tuple(true.shape)} is right"
        allowed = ROUNDINGS * max(torch.finfo(dtype).eps, FLOAT32_UNIT) * float(true.double().abs().max())
        largest = float((mine.cpu().double() - true.double()).abs().max())
        if not largest <= allowed:
            return f"in {dtype} {name} is off by {largest:.1e}, and rounding by at most {allowed:.1e}"
    return None


def _leaf(x: torch.Tensor, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    # Copy also on the same device: the operator may write into it.
    return x.detach().clone().to(device, dtype).requires_grad_(x.requires_grad)


def outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """The results of ``function(*args)``, the arguments afterwards (it may work in place), and gradients, by name.

    Gradients are of all arguments that require one, for fixed gradients of the results. Empty tensors are left out.
    """
    results = [x for x in pytree.tree_leaves(function(*args)) if isinstance(x, torch.Tensor)]
    inputs = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
    named = [(f"result {i}", x) for i, x in enumerate(results)]
    named += [(f"argument {i}", x) for i, x in enumerate(inputs)]
    return {name: x.detach() for name, x in [*named, *_gradients(results, inputs)] if x.numel()}


def _gradients(results: list[torch.Tensor], inputs: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    wanted = [(i, x) for i, x in enumerate(inputs) if x.requires_grad]
    differentiable = [x for x in results if x.requires_grad]
    if not wanted or not differentiable:
        return
    generator = torch.Generator().manual_seed(0)
    # They are drawn in float32 whatever the dtype, so that kernel and reference get the same numbers.
    upstream = [torch.randn(x.shape, generator=generator).bfloat16().to(x.device, x.dtype) for x in differentiable]
    found = torch.autograd.grad(differentiable, [x for _, x in wanted], upstream)
    for (i, _), gradient in zip(wanted, found, strict=True):
        yield f"gradient of argument {i}", gradient
