"""Sums, extremes, norms, moments and running sums."""

import math

import pytest
import torch
from accumulation import agree_rounded_once, check_multilinear, float64, placed, same, with_gradients
from agreement import FLOATING, layouts, numbers, on_npu
from hypothesis import given, settings
from hypothesis import strategies as st

INTEGERS = (torch.int64, torch.int32)
shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def some_dims(data, rank: int) -> list[int]:
    dims = data.draw(st.lists(st.integers(0, rank - 1), min_size=1, max_size=rank, unique=True))
    return [data.draw(st.sampled_from((dim, dim - rank))) for dim in dims]


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    """Few different ones, so that there are equal elements and zeros."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()


@settings(max_examples=60)
@given(shapes, st.sampled_from(FLOATING), st.booleans(), st.sampled_from(("sum", "mean", "sum of all")), st.data())
def test_a_sum_or_mean_and_its_gradient_round_once(shape, dtype, keepdim, kind, data):
    dims = None if kind == "sum of all" else some_dims(data, len(shape))
    reduce = torch.mean if kind == "mean" else torch.sum
    function = (lambda x: reduce(x)) if dims is None else lambda x: reduce(x, dims, keepdim)
    value = numbers(*shape, seed=1, dtype=dtype)
    check_multilinear(function, [value], dtype, [data.draw(layouts(len(shape)))], terms=math.prod(shape))


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("dims", [None, [0], [1], [0, 2], [1, 2]])
@pytest.mark.parametrize("mean", [False, True])
def test_a_long_sum_does_not_lose_small_terms(dtype, dims, mean):
    value = numbers(40, 30, 50, seed=1, dtype=dtype).abs()
    function = torch.mean if mean else torch.sum
    found = function(on_npu(value, dtype)) if dims is None else function(on_npu(value, dtype), dims)
    expected = function(value) if dims is None else function(value, dims)
    agree_rounded_once(found, expected, 300 * expected)


@pytest.mark.parametrize("dtype", (*INTEGERS, torch.bool, torch.bfloat16))
def test_a_sum_can_be_asked_for_in_another_dtype(dtype):
    value = whole_numbers(4, 5, seed=1).to(dtype)
    same(value.npu().sum(1, dtype=torch.float32), value.double().sum(1))
    same(value.npu().sum(), value.double().sum())


def test_sums_of_nothing_are_zero():
    same(torch.zeros(0, 3).npu().sum(0), torch.zeros(3))
    same(torch.zeros(0, 3).npu().sum(1), torch.zeros(0))
    same(torch.zeros(0).npu().sum(), torch.tensor(0))


EXTREMES = {
    "amax": lambda x, dim, keep: [x.amax(dim, keep)],
    "amin": lambda x, dim, keep: [x.amin(dim, keep)],
    "max": lambda x, dim, keep: [x.max(dim, keep)[0]],
    "min": lambda x, dim, keep: [x.min(dim, keep)[0]],
    "max of all": lambda x, dim, keep: [x.max()],
    "min of all": lambda x, dim, keep: [x.min()],
    "aminmax": lambda x, dim, keep: list(torch.aminmax(x, dim=dim, keepdim=keep)),
    "median": lambda x, dim, keep: [x.median(dim, keep)[0]],
    "kthvalue": lambda x, dim, keep: [x.kthvalue(1, dim, keep)[0]],
    "cummax": lambda x, dim, keep: [x.cummax(dim)[0]],
    "cummin": lambda x, dim, keep: [x.cummin(dim)[0]],
    "any": lambda x, dim, keep: [(x != 0).any(dim, keep), (x != 0).any()],
    "all": lambda x, dim, keep: [(x != 0).all(dim, keep), (x != 0).all()],
    "count_nonzero": lambda x, dim, keep: [torch.count_nonzero(x, dim), torch.count_nonzero(x)],
}


@pytest.mark.parametrize("name", EXTREMES)
@settings(max_examples=30)
@given(shapes, st.sampled_from((*FLOATING, *INTEGERS)), st.booleans(), st.data())
def test_an_extreme_is_exact(name, shape, dtype, keepdim, data):
    value = whole_numbers(*shape, seed=1)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    found = EXTREMES[name](on_npu(value, dtype, data.draw(layouts(len(shape)))), dim, keepdim)
    for mine, true in zip(found, EXTREMES[name](value, dim, keepdim), strict=True):
        same(mine, true)


@pytest.mark.parametrize("largest", [True, False])
@settings(max_examples=40)
@given(shapes, st.sampled_from((*FLOATING, *INTEGERS)), st.booleans(), st.data())
def test_an_index_of_an_extreme_points_at_one(largest, shape, dtype, keepdim, data):
    value = whole_numbers(*shape, seed=1)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    device = on_npu(value, dtype, data.draw(layouts(len(shape))))
    arg, both = (torch.argmax, torch.max) if largest else (torch.argmin, torch.min)
    expected = both(value, dim, True)[0]
    for index in (arg(device, dim, keepdim), both(device, dim, keepdim)[1]):
        assert index.dtype == torch.int64
        assert index.shape == both(value, dim, keepdim)[0].shape
        index = index if keepdim else index.unsqueeze(dim)
        assert torch.equal(value.gather(dim, index.cpu()), expected)
    assert value.flatten()[arg(device).item()] == (value.max() if largest else value.min())


@pytest.mark.parametrize("name", ["max", "min"])
def test_the_gradient_of_an_extreme_goes_to_it(name):
    value, upstream = numbers(4, 5, seed=1, dtype=torch.float32), numbers(4, seed=2, dtype=torch.float32)
    function = lambda x: getattr(torch, name)(x, 1)[0]  # noqa: E731
    found = with_gradients(function, placed([value], torch.float32, [None]), upstream.float().npu())
    for mine, true in zip(found, with_gradients(function, float64([value]), upstream), strict=True):
        same(mine, true)


NORMS = (0, 1, 2, 3, math.inf, -math.inf)


@pytest.mark.parametrize("order", NORMS)
@settings(max_examples=30)
@given(shapes, st.sampled_from(FLOATING), st.booleans(), st.data())
def test_a_norm_rounds_once(order, shape, dtype, keepdim, data):
    value = numbers(*shape, seed=1, dtype=dtype)
    device = on_npu(value, dtype, data.draw(layouts(len(shape))))
    dims = some_dims(data, len(shape))
    expected = torch.linalg.vector_norm(value, order, dims, keepdim)
    # Every float32 rounding of the terms and of their sum, of the root and of its power of the cube.
    count = math.prod(shape) + 12
    agree_rounded_once(torch.linalg.vector_norm(device, order, dims, keepdim), expected, count * expected)
    agree_rounded_once(torch.norm(device, order, dims, keepdim), expected, count * expected)
    whole = torch.linalg.vector_norm(value, order)
    agree_rounded_once(torch.linalg.vector_norm(device, order), whole, count * whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_of_a_gradient_can_be_taken_in_float32(dtype):
    value = numbers(300, seed=1, dtype=dtype)
    found = torch.linalg.vector_norm(on_npu(value, dtype), 2, dtype=torch.float32)
    assert found.dtype == torch.float32
    agree_rounded_once(found, torch.linalg.vector_norm(value), 300 * torch.linalg.vector_norm(value))


@pytest.mark.parametrize("name", ["var", "std"])
@settings(max_examples=40)
@given(st.lists(st.integers(2, 6), min_size=1, max_size=3), st.sampled_from(FLOATING), st.integers(0, 1), st.data())
def test_variance_and_deviation_round_once(name, shape, dtype, correction, data):
    value = numbers(*shape, seed=1, dtype=dtype)
    device = on_npu(value, dtype, data.draw(layouts(len(shape))))
    dims = some_dims(data, len(shape))
    function = getattr(torch, name)
    expected = function(value, dims, correction=correction)
    count = 4 * math.prod(shape) + 8
    agree_rounded_once(function(device, dims, correction=correction), expected, count * expected)
    moments = getattr(torch, f"{name}_mean")(device, dims, correction=correction)
    agree_rounded_once(moments[0], expected, count * expected)
    agree_rounded_once(moments[1], value.mean(dims), count * value.abs().mean(dims))


@settings(max_examples=40)
@given(shapes, st.sampled_from(FLOATING), st.booleans(), st.data())
def test_logsumexp_rounds_once(shape, dtype, keepdim, data):
    value = 4 * numbers(*shape, seed=1, dtype=dtype)
    dims = some_dims(data, len(shape))
    expected = torch.logsumexp(value, dims, keepdim)
    found = torch.logsumexp(on_npu(value, dtype, data.draw(layouts(len(shape)))), dims, keepdim)
    agree_rounded_once(found, expected, math.prod(shape) + 10 + 2 * expected.abs() + 2 * value.abs().max())


@settings(max_examples=40)
@given(shapes, st.sampled_from(FLOATING), st.data())
def test_a_product_of_elements_rounds_once(shape, dtype, data):
    value = numbers(*shape, seed=1, dtype=dtype).abs() + 0.5
    value = value.to(dtype).double()
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    device = on_npu(value, dtype, data.draw(layouts(len(shape))))
    agree_rounded_once(device.prod(dim), value.prod(dim), shape[dim] * value.prod(dim))


@settings(max_examples=40)
@given(shapes, st.sampled_from(FLOATING), st.data())
def test_a_running_sum_or_product_is_kept_in_float32(shape, dtype, data):
    value = numbers(*shape, seed=1, dtype=dtype)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    device = on_npu(value, dtype, data.draw(layouts(len(shape))))
    agree_rounded_once(device.cumsum(dim), value.cumsum(dim), (shape[dim] + 2) * value.abs().cumsum(dim))
    agree_rounded_once(device.cumprod(dim), value.cumprod(dim), (shape[dim] + 2) * value.cumprod(dim).abs())


def test_a_running_sum_of_whole_numbers_and_masks_is_int64():
    value = whole_numbers(3, 4, seed=1)
    for dtype in (*INTEGERS, torch.bool):
        found = value.to(dtype).npu().cumsum(1)
        assert found.dtype == torch.int64
        same(found, value.to(dtype).double().cumsum(1))


def test_what_is_reduced_over_everything_is_right():
    value = whole_numbers(3, 4, seed=1)
    device = value.float().npu()
    for function in (torch.prod, torch.median, lambda x: x[:, :3].trace(), lambda x: torch.nansum(x / x)):
        same(function(device), function(value))
    for function in (torch.aminmax, torch.ops.aten._aminmax, lambda x: torch.ops.aten._aminmax.dim(x, 1, True)):
        for mine, true in zip(function(device), function(value), strict=True):
            same(mine, true)


@pytest.mark.parametrize("order", NORMS)
def test_a_norm_called_by_its_old_name_rounds_once(order):
    value = numbers(4, 5, seed=1, dtype=torch.float32)
    expected = torch.linalg.vector_norm(value, order, 1)
    found = torch.ops.aten.norm.ScalarOpt_dim(value.float().npu(), order, [1])
    agree_rounded_once(found, expected, 20 * expected)
