"""Layer, group and batch norm, and their gradients."""

import math

import pytest
import torch
from accumulation import agree_rounded_once, float64, placed, with_gradients
from agreement import FLOATING, layouts, numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional


def normalized(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` without mean and with deviation 1 over ``dims``, and one over its deviation."""
    centered = x - x.mean(dims, keepdim=True)
    inverse = (centered.square().mean(dims, keepdim=True) + 1e-5).rsqrt()
    return centered * inverse, inverse


def check(function, values, dtype, places, dims, scale):
    """Forward and backward of a norm over ``dims`` of values[0], times ``scale(weight)``, plus a bias.

    Float32 roundings: of the moments (as many as elements) and a few of the arithmetic, on the magnitudes that meet in
    each result.
    """
    x = values[0]
    upstream = numbers(*x.shape, seed=9, dtype=dtype)
    found = with_gradients(function, placed(values, dtype, places), upstream.to(dtype).npu())
    expected = with_gradients(function, float64(values), upstream)
    unit, inverse = normalized(x, dims)
    count = 3 * math.prod(x.shape) + 12
    weight = scale(values[1]).abs() if len(values) > 1 else torch.ones(())
    size = unit.abs() + inverse * x.abs().mean(dims, keepdim=True) + inverse.square() * 1e-5
    terms = weight * upstream.abs()
    mean = lambda t: t.mean(dims, keepdim=True)  # noqa: E731
    magnitudes = [weight * size + 3, inverse * (1 + size) * (terms + mean(terms) + size * mean(terms * size))]
    if len(values) > 1:
        magnitudes += [(upstream.abs() * size).sum(), upstream.abs().sum()]
    for mine, true, magnitude in zip(found, expected, magnitudes, strict=True):
        assert mine.dtype == dtype
        agree_rounded_once(mine, true, count * magnitude)


@pytest.mark.parametrize("affine", [True, False])
@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 5), min_size=0, max_size=2), st.lists(st.integers(2, 6), min_size=1, max_size=2), st.data()
)
def test_a_layer_norm_and_its_gradients_compute_in_float32(affine, leading, shape, data):
    dtype = data.draw(st.sampled_from(FLOATING))
    values = [numbers(*leading, *shape, seed=1, dtype=dtype)]
    if affine:
        values += [numbers(*shape, seed=2, dtype=dtype), numbers(*shape, seed=3, dtype=dtype)]
    places = [data.draw(layouts(len(leading) + len(shape))), None, None][: len(values)]
    dims = tuple(range(-len(shape), 0))
    check(lambda x, *wb: functional.layer_norm(x, shape, *wb), values, dtype, places, dims, lambda weight: weight)


@settings(max_examples=30)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(2, 5), st.data())
def test_a_group_norm_and_its_gradients_are_right(n, groups, per_group, size, data):
    channels = groups * per_group
    values = [numbers(n, channels, size, seed=1), numbers(channels, seed=2), numbers(channels, seed=3)]
    values = [value.float().double() for value in values]
    function = lambda x, w, b: functional.group_norm(x, groups, w, b)  # noqa: E731
    upstream = numbers(n, channels, size, seed=9, dtype=torch.float32)
    place = data.draw(layouts(3))
    found = with_gradients(function, placed(values, torch.float32, [place, None, None]), upstream.float().npu())
    expected = with_gradients(function, float64(values), upstream)
    _, inverse = normalized(values[0].reshape(n, groups, -1), (2,))
    for mine, true in zip(found, expected, strict=True):
        agree_rounded_once(mine, true, 60 * (true.abs() + inverse.max() ** 2 * n * size * 20))


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_its_gradients_and_its_running_statistics_are_right(training):
    values = [numbers(*shape, seed=seed, dtype=torch.float32) for seed, shape in enumerate([(5, 4, 3), (4,), (4,)])]
    upstream = numbers(5, 4, 3, seed=9, dtype=torch.float32)
    mean, var = numbers(4, seed=5, dtype=torch.float32), numbers(4, seed=6, dtype=torch.float32).abs() + 0.5
    var = var.float().double()
    on_device = [mean.float().npu(), var.float().npu()]
    run = lambda m, v: lambda x, w, b: functional.batch_norm(x, m, v, w, b, training=training, momentum=0.3)  # noqa: E731
    found = with_gradients(run(*on_device), placed(values, torch.float32, [None] * 3), upstream.float().npu())
    expected = with_gradients(run(mean, var), float64(values), upstream)
    for mine, true in zip([*found, *on_device], [*expected, mean, var], strict=True):
        agree_rounded_once(mine, true, 60 * (true.abs() + 10))
