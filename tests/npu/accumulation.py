"""Operators on an NPU, forward and backward, against float64 on the CPU, for results that are summed in float32."""

from collections.abc import Callable, Sequence

import torch
from agreement import Layout, agree, numbers, on_npu

FLOAT32_ROUNDING = 2.0**-24


def agree_rounded_once(found: torch.Tensor, expected: torch.Tensor, internal: torch.Tensor) -> None:
    """Assert that ``found`` was computed in float32 and rounded once to its dtype.

    ``internal`` says how far float32 may be off, in units of its rounding: the sum over all float32 roundings of the
    magnitude that is rounded.
    """
    ratio = FLOAT32_ROUNDING / (torch.finfo(found.dtype).eps / 2)
    agree(found, expected, expected.abs() + internal.abs() * ratio, roundings=1)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that ``found`` (NPU) has exactly the values of ``expected`` (CPU), whatever the dtype of the latter."""
    assert found.device.type == "npu", found.device
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert torch.equal(found.cpu(), expected.to(found.dtype)), (found.cpu(), expected)


def placed(values: Sequence[torch.Tensor], dtype: torch.dtype, layouts: Sequence[Layout | None]) -> list[torch.Tensor]:
    """``values`` as leaves of ``dtype`` on the NPU, each in its layout."""
    return [on_npu(value, dtype, layout).requires_grad_() for value, layout in zip(values, layouts, strict=True)]


def with_gradients(
    function: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor], upstream: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """What ``function`` gives for ``leaves``, and the gradients of all that ``upstream`` makes (None: no gradients)."""
    result = function(*leaves)
    if upstream is None:
        return [result.detach()]
    return [result.detach(), *torch.autograd.grad(result, leaves, upstream.to(result.dtype))]


def float64(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Fresh float64 leaves on the CPU."""
    return [value.detach().clone().requires_grad_() for value in values]


def check_multilinear(
    function: Callable[..., torch.Tensor],
    values: Sequence[torch.Tensor],
    dtype: torch.dtype,
    layouts: Sequence[Layout | None],
    terms: int,
) -> None:
    """Assert that ``function`` and its gradients are right, summed in float32 and rounded once.

    ``function`` is a sum of products of its arguments, of at most ``terms`` terms, with no negative coefficient: with
    absolute values for its arguments it gives the sum of the magnitudes, forward and backward.
    """
    with torch.no_grad():
        shape = function(*values).shape
    upstream = numbers(*shape, seed=99, dtype=dtype)
    found = with_gradients(function, placed(values, dtype, layouts), upstream.to(dtype).npu())
    expected = with_gradients(function, float64(values), upstream)
    magnitude = with_gradients(function, float64([value.abs() for value in values]), upstream.abs())
    for mine, true, terms_of in zip(found, expected, magnitude, strict=True):
        assert mine.dtype == dtype
        agree_rounded_once(mine, true, (terms + 3) * terms_of)
