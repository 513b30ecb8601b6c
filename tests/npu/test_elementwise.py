"""Arithmetic element by element on NPUs is that of float64 on the CPU, rounded."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from agreement import FLOATING, agree, layouts, on_npu, rounded, within
from hypothesis import given, settings
from hypothesis import strategies as st

SHAPES = st.lists(st.integers(0, 5), max_size=4)
INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Unary:
    """A function of one tensor, the numbers it is tried on, and the half units in the last place it may be off by."""

    name: str
    low: float = -4
    high: float = 4
    roundings: float = 2

    def __str__(self) -> str:
        return self.name


# A vectorised elementary function is off by up to 1 unit (2 halves), and its result is rounded once more to 16 bits.
ELEMENTARY = 3
UNARY = (
    *(Unary(name, roundings=0) for name in ("abs", "neg", "sign", "floor", "ceil", "round", "trunc", "frac", "sgn")),
    Unary("square", roundings=1),
    Unary("sqrt", 0.01, 100, roundings=1),
    Unary("reciprocal", 0.01, 100, roundings=1),
    Unary("rsqrt", 0.01, 100),
    *(Unary(name, roundings=ELEMENTARY) for name in ("exp", "exp2", "expm1", "sin", "cos", "sinh", "cosh", "tanh")),
    *(Unary(name, 0.01, 100, ELEMENTARY) for name in ("log", "log2", "log10", "log1p")),
    *(Unary(name, -0.95, 0.95, ELEMENTARY) for name in ("asin", "acos", "atanh")),
    *(Unary(name, roundings=ELEMENTARY) for name in ("atan", "asinh", "erf", "sigmoid")),
    Unary("tan", -1.5, 1.5, 5),  # vectorised to 3.5 units
    Unary("acosh", 1.1, 10, 5),  # a logarithm of a sum with a root
    Unary("erfc", -2, 2, 5),
    Unary("erfinv", -0.9, 0.9, 8),  # ATen's own approximation
)


@pytest.mark.parametrize("function", UNARY, ids=str)
@settings(max_examples=20)
@given(st.data())
def test_a_function_of_one_tensor_is_that_of_float64_rounded(function, data):
    shape, dtype = data.draw(SHAPES), data.draw(st.sampled_from(FLOATING))
    value = within(function.low, function.high, *shape, seed=data.draw(st.integers(0, 9)), dtype=dtype)
    expected = getattr(torch, function.name)(value)
    placed = on_npu(value, dtype, data.draw(layouts(len(shape))))
    agree(getattr(torch, function.name)(placed), expected, roundings=function.roundings)
    out = on_npu(torch.zeros_like(value), dtype, data.draw(layouts(len(shape))))
    agree(getattr(torch, function.name)(placed, out=out), expected, roundings=function.roundings)
    agree(getattr(placed, f"{function.name}_")(), expected, roundings=function.roundings)
    agree(placed, expected, roundings=function.roundings)


SPECIAL = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan)


# Without the sign of NaN: CANN does not document it, and ATen's is 0.
@pytest.mark.parametrize("function", [each for each in UNARY if each.name != "sign"], ids=str)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_infinities_and_not_a_number_come_out_as_in_float64(function, dtype):
    value = torch.tensor(SPECIAL, dtype=torch.float64)
    agree(
        getattr(torch, function.name)(on_npu(value, dtype)),
        getattr(torch, function.name)(value),
        roundings=function.roundings,
    )


@pytest.mark.parametrize("name", ["exp", "sqrt", "sin", "sigmoid", "tanh", "log", "reciprocal"])
def test_a_function_of_whole_numbers_gives_float32(name):
    value = torch.arange(1, 8)
    found = getattr(torch, name)(value.npu())
    assert found.dtype == torch.float32
    agree(found, getattr(torch, name)(value.double()), roundings=ELEMENTARY)


@given(st.integers(-3, 3), st.sampled_from(FLOATING))
def test_rounding_to_decimals(decimals, dtype):
    value = within(-200, 200, 4, 5, seed=3, dtype=dtype)
    found = torch.round(on_npu(value, dtype), decimals=decimals).cpu().double()
    assert torch.equal(on_npu(value, dtype).round_(decimals=decimals).cpu().double(), found)
    unit = 10.0**-decimals
    assert bool(((found - value).abs() <= unit / 2 + torch.finfo(dtype).eps * (value.abs() + unit)).all())
    scaled = found / unit
    assert bool(((scaled - scaled.round()).abs() <= torch.finfo(dtype).eps * scaled.abs()).all())


def difference(a: Any, b: Any) -> Any:
    return torch.sub(a, b, alpha=0.5)


def weighted_sum(a: Any, b: Any) -> Any:
    return torch.add(a, b, alpha=0.5)


@dataclass(frozen=True)
class Binary:
    """A function of two tensors, the numbers each is tried on, and the half units it may be off by."""

    name: str
    left: tuple[float, float] = (-4, 4)
    right: tuple[float, float] = (-4, 4)
    roundings: float = 1

    def __str__(self) -> str:
        return self.name


POSITIVE = (0.5, 4)
BINARY = (
    Binary("add"),
    Binary("sub"),
    Binary("mul"),
    Binary("div", right=POSITIVE),
    Binary("pow", POSITIVE, roundings=ELEMENTARY),
    Binary("maximum", roundings=0),
    Binary("minimum", roundings=0),
    Binary("fmod", right=POSITIVE),
    Binary("remainder", right=POSITIVE),
    Binary("atan2", right=POSITIVE, roundings=ELEMENTARY),
    Binary("logaddexp", POSITIVE, POSITIVE, roundings=2 * ELEMENTARY),  # an exponential, a logarithm and a sum
    Binary("xlogy", right=POSITIVE, roundings=ELEMENTARY + 1),
    Binary("true_divide", right=POSITIVE),
)


@st.composite
def broadcast(draw):
    """Two shapes that broadcast to one."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    one = [1 if draw(st.booleans()) else size for size in shape]
    return (shape, one[draw(st.integers(0, len(one))) :])[:: draw(st.sampled_from((1, -1)))]


@pytest.mark.parametrize("function", BINARY, ids=str)
@settings(max_examples=25)
@given(st.data())
def test_a_function_of_two_tensors_broadcasts_and_is_that_of_float64_rounded(function, data):
    (left, right), dtype = data.draw(broadcast()), data.draw(st.sampled_from(FLOATING))
    a, b = within(*function.left, *left, seed=1, dtype=dtype), within(*function.right, *right, seed=2, dtype=dtype)
    on_a, on_b = (on_npu(v, dtype, data.draw(layouts(v.dim()))) for v in (a, b))
    expected = getattr(torch, function.name)(a, b)
    # What a sum is made of; the others have one term.
    magnitude = {"remainder": a.abs() + b.abs(), "xlogy": a.abs() * (b.log().abs() + 1)}.get(function.name)
    agree(getattr(torch, function.name)(on_a, on_b), expected, magnitude, function.roundings)
    out = on_npu(torch.zeros_like(expected), dtype, data.draw(layouts(expected.dim())))
    agree(getattr(torch, function.name)(on_a, on_b, out=out), expected, magnitude, function.roundings)
    if a.shape == expected.shape and hasattr(on_a, f"{function.name}_"):
        agree(getattr(on_a, f"{function.name}_")(on_b), expected, magnitude, function.roundings)


SCALAR = {
    "add": lambda v: v + 1.5,
    "radd": lambda v: 1.5 + v,
    "sub": lambda v: v - 1.5,
    "rsub": lambda v: 1.5 - v,
    "rsub of 2": lambda v: 2 - v,
    "mul": lambda v: v * 1.5,
    "rmul": lambda v: 2 * v,
    "div": lambda v: v / 2.5,
    "rdiv": lambda v: 1 / v,
    "square": lambda v: v**2,
    "pow of a half": lambda v: v**0.5,
    "inverse root": lambda v: v**-0.5,
    "rpow": lambda v: 2**v,
    "pow": lambda v: v**2.5,
    "fmod": lambda v: torch.fmod(v, 1.5),
    "clamp": lambda v: v.clamp(1, 2),
    "clamp from below": lambda v: v.clamp(min=1),
    "clamp from above": lambda v: v.clamp(max=2),
    "clamp_min": lambda v: torch.clamp_min(v, 1),
    "clamp_max": lambda v: torch.clamp_max(v, 2),
}


@pytest.mark.parametrize("name", SCALAR)
@settings(max_examples=20)
@given(st.data())
def test_a_function_of_a_tensor_and_a_scalar_is_that_of_float64_rounded(name, data):
    shape, dtype = data.draw(SHAPES), data.draw(st.sampled_from(FLOATING))
    value = within(0.5, 4, *shape, seed=4, dtype=dtype)
    found = SCALAR[name](on_npu(value, dtype, data.draw(layouts(len(shape)))))
    agree(found, SCALAR[name](value), roundings=ELEMENTARY if "pow" in name or "inverse" in name else 1)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_a_product_with_a_logarithm_takes_scalars(dtype):
    value = within(0.5, 4, 4, 5, seed=4, dtype=dtype)
    placed = on_npu(value, dtype)
    magnitude = value.log().abs() + 1
    agree(torch.xlogy(2.0, placed), torch.xlogy(2.0, value), 2 * magnitude, ELEMENTARY + 1)
    agree(torch.xlogy(placed, 3.0), torch.xlogy(value, 3.0), 3 * value, ELEMENTARY + 1)
    agree(placed.xlogy_(3.0), torch.xlogy(value, 3.0), 3 * value, ELEMENTARY + 1)


IN_PLACE = {
    "add_": lambda v: v.add_(1.5, alpha=2),
    "sub_": lambda v: v.sub_(1.5, alpha=2),
    "mul_": lambda v: v.mul_(0.75),
    "div_": lambda v: v.div_(2.5),
    "pow_": lambda v: v.pow_(2),
    "fmod_": lambda v: v.fmod_(1.5),
    "clamp_": lambda v: v.clamp_(1, 2),
    "clamp_ from below": lambda v: v.clamp_(min=1),
    "clamp_ from above": lambda v: v.clamp_(max=2),
}


@pytest.mark.parametrize("name", IN_PLACE)
@settings(max_examples=15)
@given(st.data())
def test_what_is_done_in_place_changes_the_tensor_and_nothing_around_it(name, data):
    dtype, inner = data.draw(st.sampled_from(FLOATING)), data.draw(st.integers(1, 5))
    value = within(0.5, 4, 3, 7, seed=5, dtype=dtype)
    whole = on_npu(value, dtype)
    view = whole[1, 1 : 1 + inner]
    assert IN_PLACE[name](view).data_ptr() == view.data_ptr()
    expected = value.clone()
    IN_PLACE[name](expected[1, 1 : 1 + inner])
    agree(whole, expected, expected.abs() + value.abs(), roundings=1)


@settings(max_examples=30)
@given(st.data())
def test_sums_with_a_factor(data):
    dtype, shape = data.draw(st.sampled_from(FLOATING)), data.draw(SHAPES)
    a, b, c = (within(-4, 4, *shape, seed=seed, dtype=dtype) for seed in (1, 2, 3))
    on_a, on_b, on_c = (on_npu(value, dtype, data.draw(layouts(len(shape)))) for value in (a, b, c))
    for function in (weighted_sum, difference):
        agree(function(on_a, on_b), function(a, b), a.abs() + b.abs())
    # Two products and a sum: three roundings in float32, of what is at most as large as the magnitude.
    magnitude = a.abs() + 0.3 * (b * c).abs()
    agree(torch.addcmul(on_a, on_b, on_c, value=0.3), torch.addcmul(a, b, c, value=0.3), magnitude, roundings=3)
    agree(on_a.clone().addcmul_(on_b, on_c, value=0.3), torch.addcmul(a, b, c, value=0.3), magnitude, roundings=3)
    divisor = rounded(c.abs() + 0.5, dtype)
    on_divisor = on_npu(divisor, dtype)
    magnitude = a.abs() + 0.3 * (b / divisor).abs()
    agree(torch.addcdiv(on_a, on_b, on_divisor, value=0.3), torch.addcdiv(a, b, divisor, value=0.3), magnitude, 3)
    agree(on_a.clone().addcdiv_(on_b, on_divisor, value=0.3), torch.addcdiv(a, b, divisor, value=0.3), magnitude, 3)


@settings(max_examples=30)
@given(st.data())
def test_a_weighted_mean_of_two_tensors(data):
    dtype, shape = data.draw(st.sampled_from(FLOATING)), data.draw(SHAPES)
    a, b = (within(-4, 4, *shape, seed=seed, dtype=dtype) for seed in (1, 2))
    weight = within(0, 1, *shape, seed=3, dtype=dtype)
    on_a, on_b, on_weight = (on_npu(value, dtype, data.draw(layouts(len(shape)))) for value in (a, b, weight))
    magnitude = 2 * (a.abs() + b.abs())  # the difference of the two is rounded before it is weighted
    agree(torch.lerp(on_a, on_b, 0.3), torch.lerp(a, b, 0.3), magnitude)
    agree(torch.lerp(on_a, on_b, on_weight), torch.lerp(a, b, weight), magnitude)
    agree(on_a.clone().lerp_(on_b, 0.7), torch.lerp(a, b, 0.7), magnitude)
    agree(on_a.clone().lerp_(on_b, on_weight), torch.lerp(a, b, weight), magnitude)


QUOTIENTS = {
    "div trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "div floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "div_ trunc": lambda a, b: a.clone().div_(b, rounding_mode="trunc"),
    "div_ floor": lambda a, b: a.clone().div_(b, rounding_mode="floor"),
    "floor_divide_": lambda a, b: a.clone().floor_divide_(b),
    "remainder_": lambda a, b: a.clone().remainder_(b),
    "fmod_": lambda a, b: a.clone().fmod_(b),
}


@pytest.mark.parametrize("name", QUOTIENTS)
@settings(max_examples=20)
@given(st.data())
def test_quotients_are_rounded_and_leave_remainders_of_the_right_sign(name, data):
    dtype = data.draw(st.sampled_from((*FLOATING, *INTEGERS)))
    shape = data.draw(st.lists(st.integers(1, 4), max_size=3))
    # Of few bits, so that no quotient lies so close to a whole number that float32 takes it for one.
    a = within(-40, 40, *shape, seed=1, dtype=torch.bfloat16).round()
    b = within(1, 9, *shape, seed=2, dtype=torch.bfloat16).round() * data.draw(st.sampled_from((1, -1)))
    on_a, on_b = (on_npu(value, dtype, data.draw(layouts(len(shape)))) for value in (a, b))
    found = QUOTIENTS[name](on_a, on_b)
    assert found.dtype == dtype
    assert torch.equal(found.cpu().double(), QUOTIENTS[name](a, b))
    scalar = data.draw(st.sampled_from((-3, 2, 7)))
    assert torch.equal(QUOTIENTS[name](on_a, scalar).cpu().double(), QUOTIENTS[name](a, float(scalar)))
    if name == "remainder":
        assert torch.equal(torch.remainder(scalar, on_b).cpu().double(), torch.remainder(float(scalar), b))


@settings(max_examples=30)
@given(st.data())
def test_where_chooses_and_masked_fill_replaces(data):
    (left, right), dtype = data.draw(broadcast()), data.draw(st.sampled_from((*FLOATING, *INTEGERS, torch.bool)))
    a, b = (within(-3, 3, *shape, seed=1, dtype=torch.bfloat16).round() for shape in (left, right))
    a, b = a.to(dtype).double(), b.to(dtype).double()
    mask = within(0, 1, *right, seed=2, dtype=torch.float32) > 0.5
    on_a, on_b = (on_npu(value, dtype, data.draw(layouts(value.dim()))) for value in (a, b))
    on_mask = on_npu(mask, torch.bool, data.draw(layouts(mask.dim())))
    assert torch.equal(torch.where(on_mask, on_a, on_b).cpu().double(), torch.where(mask, a, b))
    assert torch.equal(torch.where(on_mask, on_a, 1).cpu().double(), torch.where(mask, a, 1.0))
    one = torch.ones((), dtype=dtype, device="npu")
    assert torch.equal(on_a.masked_fill(on_mask, one).cpu().double(), a.masked_fill(mask, 1))
    assert torch.equal(on_a.masked_fill(on_mask, 1).cpu().double(), a.masked_fill(mask, 1))
    if a.shape == torch.broadcast_shapes(a.shape, mask.shape):
        assert torch.equal(on_a.masked_fill_(on_mask, 1).cpu().double(), a.masked_fill(mask, 1))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_masking_with_minus_infinity_and_the_smallest_number(dtype):
    value, mask = torch.zeros(3), torch.tensor([True, False, True])
    for fill in (-math.inf, torch.finfo(dtype).min):
        found = on_npu(value, dtype).masked_fill(mask.npu(), fill)
        assert found.cpu().double().tolist() == [fill, 0, fill]


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("replacements", [(None, None, None), (1.0, 2.0, -2.0)], ids=str)
def test_what_is_no_finite_number_is_replaced(dtype, replacements):
    value = torch.tensor(SPECIAL, dtype=dtype)
    expected = torch.nan_to_num(value, *replacements)
    assert torch.equal(torch.nan_to_num(value.npu(), *replacements).cpu(), expected)
    assert torch.equal(value.npu().nan_to_num_(*replacements).cpu(), expected)


GRADIENTS = {
    "add": lambda a, b: a + 2 * b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "square": lambda a, b: a**2 + 0 * b,
    "pow": lambda a, b: a**b,
    "rsqrt": lambda a, b: torch.rsqrt(a) * b,
    "exp and log": lambda a, b: torch.exp(a) * torch.log(b),
    "sin and cos": lambda a, b: a.sin() * b.cos(),
    "maximum": torch.maximum,
    "clamp": lambda a, b: a.clamp(1, 2) * b,
    "where": lambda a, b: torch.where(a > b, a, b * b),
    "masked_fill": lambda a, b: a.masked_fill(a > b, 0.5) * b,
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "tril": lambda a, b: a.tril() * b.triu(),
    "abs": lambda a, b: (a - b).abs() * a,
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_float64(name):
    values = [within(0.5, 3, 4, 5, seed=seed, dtype=torch.float32).requires_grad_() for seed in (1, 2)]
    placed = [on_npu(value.detach(), torch.float32).requires_grad_() for value in values]
    weights = within(-1, 1, 4, 5, seed=3, dtype=torch.float32)
    for tensors in (values, placed):
        result = GRADIENTS[name](*tensors)
        result.backward(weights.to(result))
    for found, expected in zip(placed, values, strict=True):
        # A handful of float32 operations on numbers up to 3 with results up to 27 (a**b): a few units of the terms.
        agree(found.grad, expected.grad, expected.grad.abs() + 3, roundings=8)
