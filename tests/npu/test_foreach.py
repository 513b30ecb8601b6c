"""What optimizers and gradient scalers do to lists of tensors on an NPU."""

import math

import pytest
import torch
from agreement import FLOATING, agree, layouts, on_npu, rounded, within
from hypothesis import given, settings
from hypothesis import strategies as st

SHAPES = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=30)


def lists(data, count, dtype, low=0.5, high=4.0):
    """``count`` lists of tensors of the same shapes: in float64 on the CPU, of ``dtype`` and any layout on the NPU."""
    shapes = data.draw(SHAPES)
    strange = data.draw(st.booleans())  # contiguous ones take torch_npu's fast route
    values, placed = [], []
    for number in range(count):
        values.append([within(low, high, *shape, seed=31 * number + i, dtype=dtype) for i, shape in enumerate(shapes)])
        placed.append([on_npu(v, dtype, data.draw(layouts(v.dim())) if strange else None) for v in values[-1]])
    return values, placed


def agree_all(found, expected, magnitude=lambda i: None, roundings=2.0):
    assert len(found) == len(expected)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        agree(one, other, magnitude(i), roundings)


EXACT = ("abs", "neg", "sign", "floor", "ceil", "round", "trunc", "frac")
ROUNDED = ("sqrt", "reciprocal", "exp", "expm1", "log", "log1p", "log2", "log10", "sigmoid", "tanh", "erf", "sin",
           "cos", "sinh", "cosh", "atan", "erfc")  # fmt: skip


@pytest.mark.parametrize("name", EXACT + ROUNDED)
@settings(max_examples=10)
@given(st.data())
def test_a_function_of_each_tensor(name, data):
    dtype = data.draw(st.sampled_from(FLOATING))
    (values,), (placed,) = lists(data, 1, dtype)
    expected = [getattr(torch, name)(value) for value in values]
    roundings = 0 if name in EXACT else 3  # one unit of the elementary function, and a rounding
    agree_all(getattr(torch, f"_foreach_{name}")(placed), expected, roundings=roundings)
    getattr(torch, f"_foreach_{name}_")(placed)
    agree_all(placed, expected, roundings=roundings)


BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max", "pow")


@pytest.mark.parametrize("name", BINARY)
@settings(max_examples=15)
@given(st.data())
def test_a_function_of_each_tensor_and_a_tensor_or_scalar(name, data):
    dtype = data.draw(st.sampled_from(FLOATING))
    (values, others), (placed, on_others) = lists(data, 2, dtype)
    function, in_place = getattr(torch, f"_foreach_{name}"), getattr(torch, f"_foreach_{name}_")
    scalars = [1 + 0.25 * i for i in range(len(values))]
    single = getattr(torch, "maximum" if name == "clamp_min" else "minimum" if name == "clamp_max" else name)
    roundings = 3 if name == "pow" else 1

    def with_scalar(value, scalar):
        return single(value, torch.tensor(scalar, dtype=torch.float64)).to(value)

    for other, expected in (
        (on_others, [single(a, b) for a, b in zip(values, others, strict=True)]),
        (1.5, [with_scalar(a, 1.5) for a in values]),
        (2, [with_scalar(a, 2.0) for a in values]),
        (scalars, [with_scalar(a, b) for a, b in zip(values, scalars, strict=True)]),
    ):
        agree_all(function(placed, other), expected, roundings=roundings)
        changed = [tensor.clone() for tensor in placed]
        in_place(changed, other)
        agree_all(changed, expected, roundings=roundings)


@settings(max_examples=20)
@given(st.data())
def test_lists_with_factors(data):
    dtype = data.draw(st.sampled_from(FLOATING))
    (a, b, c), (on_a, on_b, on_c) = lists(data, 3, dtype)
    pairs, triples = list(zip(a, b, strict=True)), list(zip(a, b, c, strict=True))
    agree_all(torch._foreach_add(on_a, on_b, alpha=0.3), [x + 0.3 * y for x, y in pairs])
    agree_all(torch._foreach_sub(on_a, on_b, alpha=0.3), [x - 0.3 * y for x, y in pairs], lambda i: a[i] + b[i])
    factors = [0.5 + 0.1 * i for i in range(len(a))]
    on_cpu = torch.tensor(factors)
    exact = on_cpu.double().tolist()
    for name in ("addcmul", "addcdiv"):
        function, single = getattr(torch, f"_foreach_{name}"), getattr(torch, name)
        for arguments, values in (((0.3,), [0.3] * len(a)), ((factors,), factors), ((on_cpu,), exact)):
            expected = [single(x, y, z, value=value) for (x, y, z), value in zip(triples, values, strict=True)]
            agree_all(function(on_a, on_b, on_c, *arguments), expected, roundings=4)  # product, factor and sum
            changed = [tensor.clone() for tensor in on_a]
            getattr(torch, f"_foreach_{name}_")(changed, on_b, on_c, *arguments)
            agree_all(changed, expected, roundings=4)
    agree_all(torch._foreach_lerp(on_a, on_b, 0.3), [x.lerp(y, 0.3) for x, y in pairs], lambda i: 2 * (a[i] + b[i]))
    weights, on_weights = [x / 4 for x in c], [x / 4 for x in on_c]
    expected = [x.lerp(y, w) for (x, y), w in zip(pairs, weights, strict=True)]
    agree_all(torch._foreach_lerp(on_a, on_b, on_weights), expected, lambda i: 2 * (a[i] + b[i]))
    torch._foreach_lerp_(on_a, on_b, 0.7)
    agree_all(on_a, [x.lerp(y, 0.7) for x, y in pairs], lambda i: 2 * (a[i] + b[i]))


@pytest.mark.parametrize("name", ["asin", "acos", "tan"])
def test_a_function_of_numbers_between_minus_1_and_1(name):
    values = [within(-0.95, 0.95, 4, 5, seed=seed, dtype=torch.float32) for seed in (1, 2)]
    found = getattr(torch, f"_foreach_{name}")([on_npu(value, torch.float32) for value in values])
    agree_all(found, [getattr(torch, name)(value) for value in values], roundings=7)  # tan: 3.5 units


@settings(max_examples=20)
@given(st.data())
def test_powers_of_a_scalar(data):
    (values,), (placed,) = lists(data, 1, torch.float32)
    agree_all(torch._foreach_pow(2.5, placed), [2.5**value for value in values], roundings=3)


@settings(max_examples=20)
@given(st.data())
def test_lists_are_multiplied_by_a_number_on_the_device(data):
    dtype = data.draw(st.sampled_from(FLOATING))
    (values,), (placed,) = lists(data, 1, dtype)
    factor = torch.tensor(0.375, dtype=dtype, device="npu")
    agree_all(torch._foreach_mul(placed, factor), [value * 0.375 for value in values], roundings=1)
    torch._foreach_mul_(placed, factor)
    agree_all(placed, [value * 0.375 for value in values], roundings=1)


@settings(max_examples=20)
@given(st.data(), st.sampled_from(FLOATING), st.sampled_from(FLOATING))
def test_lists_are_copied_and_cast(data, source, target):
    (values,), (placed,) = lists(data, 1, source)
    targets = [torch.empty(value.shape, dtype=target, device="npu") for value in values]
    torch._foreach_copy_(targets, placed)
    agree_all(targets, [rounded(value, target) for value in values], roundings=0)
    torch._foreach_zero_(targets)
    assert not any(tensor.cpu().any() for tensor in targets)


@pytest.mark.parametrize("order", [1, 2])
@settings(max_examples=20)
@given(st.data())
def test_the_norm_of_each_tensor(order, data):
    dtype = data.draw(st.sampled_from(FLOATING))
    (values,), (placed,) = lists(data, 1, dtype, low=-4.0)
    found = torch._foreach_norm(placed, order)
    expected = [torch.linalg.vector_norm(value, order) for value in values]
    # Of n <= 64 numbers, summed in float32, whose sum's rounding may add up to n half units there; one in 16 bits.
    roundings = 64 if dtype == torch.float32 else 2
    agree_all([norm.reshape(()) for norm in found], expected, roundings=roundings)


def test_the_norm_of_a_long_bfloat16_tensor_is_summed_in_float32():
    norm = torch._foreach_norm([torch.ones(2**14, dtype=torch.bfloat16, device="npu")])[0]
    assert float(norm) == 128


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan], ids=str)
def test_a_gradient_scaler_unscales_and_finds_what_is_not_finite(dtype, bad):
    values = [within(-4, 4, 5, 7, seed=seed, dtype=dtype) for seed in range(3)]
    if bad is not None:
        values[1][2, 3] = bad
    placed = [on_npu(value, dtype) for value in values]
    found_inf, inverse = torch.zeros(1, device="npu"), torch.full((1,), 0.125, device="npu")
    torch._amp_foreach_non_finite_check_and_unscale_(placed, found_inf, inverse)
    assert found_inf.tolist() == [0.0 if bad is None else 1.0]
    agree_all(placed, [value * 0.125 for value in values], roundings=1)


def test_the_scale_falls_on_overflow_and_grows_after_an_interval_without():
    scale, tracker = torch.full((1,), 64.0, device="npu"), torch.zeros(1, dtype=torch.int32, device="npu")
    seen = []
    for overflow in (0.0, 0.0, 0.0, 1.0, 0.0):
        torch._amp_update_scale_(scale, tracker, torch.full((1,), overflow, device="npu"), 2.0, 0.5, 3)
        seen.append((scale.item(), tracker.item()))
    assert seen == [(64, 1), (64, 2), (128, 0), (64, 0), (64, 1)]


def test_a_gradient_scaler_skips_the_step_that_overflows():
    weight = torch.nn.Parameter(torch.ones(4, device="npu"))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = torch.amp.GradScaler("npu", init_scale=16.0)
    for factor, expected, scale in ((1.0, 0.5, 16), (math.inf, 0.5, 8), (1.0, 0.0, 8)):
        optimizer.zero_grad()
        scaler.scale(weight * factor).backward(torch.ones(4, device="npu"))
        scaler.step(optimizer)
        scaler.update()
        assert weight.tolist() == [expected] * 4
        assert scaler.get_scale() == scale


OPTIMIZERS = {
    "adamw": lambda p, foreach: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=foreach),
    "adam": lambda p, foreach: torch.optim.Adam(p, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1, foreach=foreach),
    "amsgrad": lambda p, foreach: torch.optim.Adam(p, lr=1e-2, amsgrad=True, maximize=True, foreach=foreach),
    "sgd": lambda p, foreach: torch.optim.SGD(p, lr=1e-2, foreach=foreach),
    "momentum": lambda p, foreach: torch.optim.SGD(
        p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=foreach
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("foreach", [True, False])
def test_three_steps_of_an_optimizer_are_those_of_float64(name, foreach):
    shapes = ((4, 5), (7,), (2, 3, 2), (1,)) * 6  # more than one call takes
    starts = [within(-1, 1, *shape, seed=i, dtype=torch.float32) for i, shape in enumerate(shapes)]
    parameters = {
        "cpu": [torch.nn.Parameter(start.clone()) for start in starts],
        "npu": [torch.nn.Parameter(on_npu(start, torch.float32)) for start in starts],
    }
    for weights in parameters.values():
        optimizer = OPTIMIZERS[name](weights, foreach)
        for step in range(3):
            for i, weight in enumerate(weights):
                weight.grad = within(0.1, 1, *weight.shape, seed=100 * step + i, dtype=torch.float32).to(weight)
            optimizer.step()
    for found, expected, start in zip(parameters["npu"], parameters["cpu"], starts, strict=True):
        # Each step multiplies the weight (decay) and adds to it; the update itself is at most about the rate, 0.01.
        agree(found.detach(), expected.detach(), start.abs() + 0.03, roundings=3 * 4)
        assert float((expected.detach() - start).abs().max()) > 1e-3


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("largest", [0.5, 1e6])
def test_gradients_are_clipped_to_a_norm(foreach, largest):
    values = [within(-1, 1, *shape, seed=i, dtype=torch.float32) for i, shape in enumerate(((4, 5), (7,), (2, 3)))]
    weights = [torch.nn.Parameter(torch.zeros(value.shape, device="npu")) for value in values]
    for weight, value in zip(weights, values, strict=True):
        weight.grad = on_npu(value, torch.float32)
    norm = torch.nn.utils.clip_grad_norm_(weights, largest, foreach=foreach)
    expected = torch.linalg.vector_norm(torch.cat([value.flatten() for value in values]))
    agree(norm, expected, roundings=33)  # a sum of 33 squares
    scale = min(1.0, largest / (float(expected) + 1e-6))
    agree_all([weight.grad for weight in weights], [value * scale for value in values], roundings=40)
