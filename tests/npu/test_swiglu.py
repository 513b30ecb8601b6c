"""Gated activations against CANN's formulas in float64."""

import pytest
import torch
import torch_npu
from agreement import FLOATING, agree, layouts, numbers, on_npu
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = st.sampled_from(FLOATING)


@st.composite
def shapes(draw) -> tuple[tuple[int, ...], int]:
    """A shape and one of its dims, of even length."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] = 2 * draw(st.sampled_from((1, 3, 20)))
    return tuple(shape), dim


def gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


# exp, a division and up to five products in float32.
ROUNDINGS = {torch.float32: 24, torch.bfloat16: 1.1, torch.float16: 1.1}


@settings(max_examples=60)
@given(shapes(), DTYPES, st.data())
def test_swiglu_and_its_gradient_follow_the_formula(shape, dtype, data):
    sizes, dim = shape
    x = numbers(*sizes, seed=1, dtype=dtype).requires_grad_()
    left, right = x.chunk(2, dim)
    expected = left * left.sigmoid() * right
    grad = numbers(*expected.shape, seed=2, dtype=dtype)
    expected.backward(grad)
    x_npu = on_npu(x.detach(), dtype, data.draw(layouts(x.dim()))).requires_grad_()
    found = torch_npu.npu_swiglu(x_npu, dim=dim)
    found.backward(on_npu(grad, dtype, data.draw(layouts(x.dim()))))
    agree(found, expected.detach(), roundings=ROUNDINGS[dtype])
    with torch.no_grad():
        # The derivative of silu is a sum that cancels near -1.28.
        sides = (grad * right).abs() * left.sigmoid() * (1 + left.abs()), (grad * left * left.sigmoid()).abs()
        agree(x_npu.grad, x.grad, torch.cat(sides, dim), ROUNDINGS[dtype])


@settings(max_examples=40)
@given(shapes(), DTYPES, st.sampled_from(("none", "tanh")), st.booleans(), st.data())
def test_geglu_and_its_gradient_follow_the_formula(shape, dtype, approximate, activate_left, data):
    sizes, dim = shape
    x = numbers(*sizes, seed=1, dtype=dtype).requires_grad_()
    left, right = x.chunk(2, dim)
    activated, other = (left, right) if activate_left else (right, left)
    expected = gelu(activated, approximate) * other
    grad = numbers(*expected.shape, seed=2, dtype=dtype)
    expected.backward(grad)
    x_npu = on_npu(x.detach(), dtype, data.draw(layouts(x.dim()))).requires_grad_()
    found, activation = torch_npu.npu_geglu(x_npu, dim, int(approximate == "tanh"), activate_left)
    found.backward(on_npu(grad, dtype))
    with torch.no_grad():
        # gelu is x * (1 + something near -1) for negative x.
        size = activated.abs()
        roundings = ROUNDINGS[dtype]
        agree(activation, gelu(activated, approximate), size, roundings)
        agree(found, expected, size * other.abs(), roundings)
        sides = (grad * other).abs() * (1 + size), (grad * size).abs() * 2
        agree(x_npu.grad, x.grad, torch.cat(sides if activate_left else sides[::-1], dim), roundings)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_mul_activates_the_left_half(dtype, approximate):
    x = numbers(3, 8, seed=1, dtype=dtype)
    left, right = x.chunk(2, -1)
    found = torch_npu.npu_gelu_mul(on_npu(x, dtype), approximate=approximate)
    agree(found, gelu(left, approximate) * right, left.abs() * right.abs(), ROUNDINGS[dtype])


def test_no_rows_give_no_rows():
    x = torch.empty(0, 8).npu().requires_grad_()
    torch_npu.npu_swiglu(x).backward(torch.empty(0, 4).npu())
    assert x.grad.shape == (0, 8)
