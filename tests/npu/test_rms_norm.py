"""RMS norms and the layer norms that are joined with an addition, against CANN's formulas in float64."""

import pytest
import torch
import torch_npu
from agreement import FLOATING, agree, layouts, numbers, on_npu, rounded
from hypothesis import given, settings
from hypothesis import strategies as st

SHAPES = st.tuples(
    st.lists(st.integers(1, 5), min_size=0, max_size=2).map(tuple),
    st.lists(st.sampled_from((1, 2, 7, 33)), min_size=1, max_size=2).map(tuple),
)
EPSILONS = st.sampled_from((1e-6, 1e-5, 0.1))
DTYPES = st.sampled_from(FLOATING)


def trailing(gamma: torch.Tensor) -> tuple[int, ...]:
    return tuple(range(-gamma.dim(), 0))


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    rstd = (x.pow(2).mean(trailing(gamma), keepdim=True) + epsilon).rsqrt()
    return x * rstd * gamma, rstd


def layer_norm(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dims = trailing(gamma)
    mean = x.mean(dims, keepdim=True)
    rstd = ((x - mean).pow(2).mean(dims, keepdim=True) + epsilon).rsqrt()
    return (x - mean) * rstd * gamma + beta, mean, rstd


# x * rstd * gamma in float32 is three roundings (rstd's own too), and rstd sums the row; then the result is rounded.
ROUNDINGS = 16


@settings(max_examples=50)
@given(SHAPES, EPSILONS, DTYPES, st.data())
def test_rms_norm_divides_by_the_root_mean_square_and_gives_its_inverse(shape, epsilon, dtype, data):
    outer, normal = shape
    x = numbers(*outer, *normal, seed=1, dtype=dtype)
    gamma = numbers(*normal, seed=2, dtype=dtype)
    found, rstd = torch_npu.npu_rms_norm(
        on_npu(x, dtype, data.draw(layouts(x.dim()))), on_npu(gamma, dtype, data.draw(layouts(gamma.dim()))), epsilon
    )
    expected, expected_rstd = rms_norm(x, gamma, epsilon)
    assert rstd.dtype == torch.float32
    agree(rstd, expected_rstd, roundings=ROUNDINGS)
    agree(found, expected, roundings=ROUNDINGS if dtype == torch.float32 else 1.01)


@settings(max_examples=50)
@given(SHAPES, EPSILONS, DTYPES, st.data())
def test_gradients_of_rms_norm_are_those_of_its_formula(shape, epsilon, dtype, data):
    outer, normal = shape
    x = numbers(*outer, *normal, seed=1, dtype=dtype).requires_grad_()
    gamma = numbers(*normal, seed=2, dtype=dtype).requires_grad_()
    grad = numbers(*outer, *normal, seed=3, dtype=dtype)
    expected, rstd = rms_norm(x, gamma, epsilon)
    expected.backward(grad)
    x_npu = on_npu(x.detach(), dtype, data.draw(layouts(x.dim()))).requires_grad_()
    gamma_npu = on_npu(gamma.detach(), dtype).requires_grad_()
    torch_npu.npu_rms_norm(x_npu, gamma_npu, epsilon)[0].backward(on_npu(grad, dtype, data.draw(layouts(x.dim()))))
    with torch.no_grad():
        terms = (grad * gamma).abs()
        normalized = (x * rstd).abs()
        magnitude = rstd * (terms + normalized * (terms * normalized).mean(trailing(gamma), keepdim=True))
        gamma_magnitude = (grad.abs() * normalized).sum(tuple(range(len(outer))), keepdim=False) if outer else None
    # float32's roundings lie far below one of bf16 or fp16, except where terms cancel: they are part of the magnitude.
    agree(x_npu.grad, x.grad, magnitude, roundings=ROUNDINGS if dtype == torch.float32 else 1.1)
    agree(gamma_npu.grad, gamma.grad, gamma_magnitude, roundings=ROUNDINGS if dtype == torch.float32 else 1.1)


@settings(max_examples=30)
@given(SHAPES, DTYPES, st.data())
def test_add_rms_norm_normalizes_the_sum_and_gives_it_back(shape, dtype, data):
    outer, normal = shape
    x1, x2 = (numbers(*outer, *normal, seed=seed, dtype=dtype) for seed in (1, 2))
    gamma = numbers(*normal, seed=3, dtype=dtype)
    arguments = [on_npu(value, dtype, data.draw(layouts(value.dim()))) for value in (x1, x2)] + [on_npu(gamma, dtype)]
    expected, expected_rstd = rms_norm(x1 + x2, gamma, 1e-6)
    roundings = ROUNDINGS if dtype == torch.float32 else 1.1
    y, rstd, x = torch_npu.npu_add_rms_norm(*arguments, 1e-6)
    # The sum of two numbers may cancel: it is exact in float64, and in float32 up to one rounding.
    conditioned = (x1.abs() + x2.abs()) * expected_rstd * gamma.abs() + expected.abs()
    agree(y, expected, conditioned, roundings)
    agree(rstd, expected_rstd, roundings=ROUNDINGS * 2)
    agree(x, x1 + x2, roundings=1.01)
    y_float, y_cast, rstd, x = torch_npu.npu_add_rms_norm_cast(*arguments, 1e-6)
    assert y_float.dtype == torch.float32
    agree(y_float, expected, conditioned, ROUNDINGS)
    agree(y_cast, expected, conditioned, roundings)
    agree(x, x1 + x2, roundings=1.01)
    rstd = torch_npu.npu_add_rms_norm_v2(*arguments, 1e-6)
    agree(rstd, expected_rstd, roundings=ROUNDINGS * 2)
    agree(arguments[0], expected, conditioned, roundings)
    agree(arguments[1], x1 + x2, roundings=1.01)


@settings(max_examples=20)
@given(SHAPES, DTYPES)
def test_gemma_rms_norm_adds_one_to_gamma(shape, dtype):
    outer, normal = shape
    x, gamma = numbers(*outer, *normal, seed=1, dtype=dtype), numbers(*normal, seed=2, dtype=dtype)
    found, rstd = torch_npu.npu_gemma_rms_norm(on_npu(x, dtype), on_npu(gamma, dtype), 1e-6)
    expected, expected_rstd = rms_norm(x, 1 + gamma, 1e-6)
    # 1 + gamma is rounded to float32 and can cancel.
    magnitude = (x * expected_rstd).abs() * (1 + gamma.abs()) + expected.abs()
    agree(found, expected, magnitude, ROUNDINGS if dtype == torch.float32 else 1.1)
    agree(rstd, expected_rstd, roundings=ROUNDINGS)


@pytest.mark.parametrize("rows", [0, 3])
def test_rms_norm_of_rows_of_zeros_or_of_no_rows_is_zeros(rows):
    y, rstd = torch_npu.npu_rms_norm(torch.zeros(rows, 8).npu(), torch.ones(8).npu(), 1e-6)
    agree(y, torch.zeros(rows, 8))
    agree(rstd, torch.full((rows, 1), 1e3, dtype=torch.float64), roundings=4)


def tangent_magnitude(x: torch.Tensor, gamma: torch.Tensor, grad: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """Sum of the absolute terms of a layer norm's gradient at x."""
    normalized = ((x - x.mean(trailing(gamma), keepdim=True)) * rstd).abs()
    spread = (x.abs() + x.abs().mean(trailing(gamma), keepdim=True)) * rstd
    terms = (grad * gamma).abs()
    means = terms.mean(trailing(gamma), keepdim=True), (terms * spread).mean(trailing(gamma), keepdim=True)
    return rstd * (terms + means[0] + (normalized + spread) * means[1])


@settings(max_examples=40)
@given(SHAPES, DTYPES, st.data())
def test_add_layer_norm_and_its_gradients_follow_the_formula(shape, dtype, data):
    outer, normal = shape
    values = [numbers(*outer, *normal, seed=seed, dtype=dtype) for seed in (1, 2)]
    values += [numbers(*normal, seed=seed, dtype=dtype) for seed in (3, 4)]
    x1, x2, gamma, beta = (value.requires_grad_() for value in values)
    grad, grad_sum = (numbers(*outer, *normal, seed=seed, dtype=dtype) for seed in (5, 6))
    expected, mean, rstd = layer_norm(x1 + x2, gamma, beta, 0.01)
    torch.autograd.backward([expected, x1 + x2], [grad, grad_sum])
    on = [on_npu(v.detach(), dtype, data.draw(layouts(v.dim()))).requires_grad_() for v in (x1, x2, gamma, beta)]
    y, found_mean, found_rstd, total = torch_npu.npu_add_layer_norm(*on, 0.01, True)
    torch.autograd.backward([y, total], [on_npu(grad, dtype), on_npu(grad_sum, dtype)])
    roundings = ROUNDINGS if dtype == torch.float32 else 1.5
    with torch.no_grad():
        x = x1 + x2
        spread = (x1.abs() + x2.abs() + x.abs().mean(trailing(gamma), keepdim=True)) * rstd
        agree(y, expected, spread * gamma.abs() + beta.abs(), roundings)
        agree(found_mean.reshape(mean.shape), mean, x.abs().mean(trailing(gamma), keepdim=True), ROUNDINGS)
        agree(found_rstd.reshape(rstd.shape), rstd, rstd * (1 + spread.pow(2).mean()), ROUNDINGS)
        agree(total, x, x1.abs() + x2.abs(), 1.01)
        magnitude = tangent_magnitude(x, gamma, grad, rstd) + grad_sum.abs()
        dims = tuple(range(len(outer)))
        for found, reference in ((on[0], x1), (on[1], x2)):
            agree(found.grad, reference.grad, magnitude, roundings)
        agree(on[2].grad, gamma.grad, (grad.abs() * spread).sum(dims) if dims else grad.abs() * spread, roundings)
        agree(on[3].grad, beta.grad, grad.abs().sum(dims) if dims else None, roundings)


@settings(max_examples=30)
@given(SHAPES, DTYPES, st.sampled_from((0.3, 2.0)))
def test_deep_norm_and_its_gradients_follow_the_formula(shape, dtype, alpha):
    outer, normal = shape
    values = [numbers(*outer, *normal, seed=seed, dtype=dtype) for seed in (1, 2)]
    values += [numbers(*normal, seed=seed, dtype=dtype) for seed in (3, 4)]
    x, gx, beta, gamma = (value.requires_grad_() for value in values)
    grad = numbers(*outer, *normal, seed=5, dtype=dtype)
    joined = alpha * x + gx
    expected, mean, rstd = layer_norm(joined, gamma, beta, 0.01)
    expected.backward(grad)
    on = [on_npu(value.detach(), dtype).requires_grad_() for value in (x, gx, beta, gamma)]
    found_mean, found_rstd, y = torch_npu.npu_deep_norm(*on, alpha, 0.01)
    y.backward(on_npu(grad, dtype))
    roundings = ROUNDINGS if dtype == torch.float32 else 1.5
    with torch.no_grad():
        size = alpha * x.abs() + gx.abs()
        spread = (size + size.mean(trailing(gamma), keepdim=True)) * rstd
        agree(y, expected, spread * gamma.abs() + beta.abs(), roundings)
        agree(found_mean, mean, size.mean(trailing(gamma), keepdim=True), ROUNDINGS)
        agree(found_rstd, rstd, rstd * (1 + spread.pow(2).mean()), ROUNDINGS)
        magnitude = tangent_magnitude(joined, gamma, grad, rstd)
        dims = tuple(range(len(outer)))
        agree(on[0].grad, x.grad, alpha * magnitude, roundings)
        agree(on[1].grad, gx.grad, magnitude, roundings)
        agree(on[2].grad, beta.grad, grad.abs().sum(dims) if dims else None, roundings)
        agree(on[3].grad, gamma.grad, (grad.abs() * spread).sum(dims) if dims else grad.abs() * spread, roundings)


@settings(max_examples=20)
@given(
    st.sampled_from(((1, 4), (2, 6))),
    st.sampled_from((1, 2)),
    st.sampled_from(((), (3,), (2, 3))),
    DTYPES,
    st.booleans(),
)
def test_group_norm_silu_activates_the_normalized_groups(leading, groups, positions, dtype, affine):
    x = numbers(*leading, *positions, seed=1, dtype=dtype)
    gamma, beta = (numbers(leading[1], seed=seed, dtype=dtype) for seed in (2, 3)) if affine else (None, None)
    found, mean, rstd = torch_npu.npu_group_norm_silu(
        on_npu(x, dtype), *(None if value is None else on_npu(value, dtype) for value in (gamma, beta)), groups, 0.01
    )
    normal = torch.nn.functional.group_norm(x, groups, gamma, beta, 0.01)
    grouped = x.reshape(leading[0], groups, -1)
    expected_rstd = (grouped.var(-1, correction=0) + 0.01).rsqrt()
    size = grouped.abs().amax(-1) * 2 * expected_rstd
    scale = size.max() * (1 if gamma is None else gamma.abs().max()) + (0 if beta is None else beta.abs().max())
    agree(found, normal * normal.sigmoid(), scale.expand(x.shape), ROUNDINGS if dtype == torch.float32 else 2)
    agree(mean, grouped.mean(-1), grouped.abs().mean(-1), ROUNDINGS)
    agree(rstd, expected_rstd, expected_rstd * (1 + size.pow(2)), ROUNDINGS)


def test_what_is_rounded_last_is_the_result_and_not_something_in_between():
    # With bf16 rounding before gamma, 1 + 2**-8 would be lost.
    x, gamma = rounded(torch.tensor([[1.0, 1.0078125]]), torch.bfloat16), torch.tensor([3.0, 3.0], dtype=torch.float64)
    found, _ = torch_npu.npu_rms_norm(x.bfloat16().npu(), gamma.bfloat16().npu(), 0.0)
    agree(found, rms_norm(x, gamma, 0.0)[0], roundings=1)
