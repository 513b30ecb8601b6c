"""Softmax, its logarithm, and their gradients."""

import pytest
import torch
from accumulation import agree_rounded_once, float64, placed, with_gradients
from agreement import FLOATING, layouts, numbers, on_npu
from hypothesis import given, settings
from hypothesis import strategies as st

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@pytest.mark.parametrize("logarithm", [False, True])
@settings(max_examples=60)
@given(shapes, st.sampled_from(FLOATING), st.data())
def test_softmax_and_its_gradient_compute_in_float32_and_round_once(logarithm, shape, dtype, data):
    function = torch.log_softmax if logarithm else torch.softmax
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    value, upstream = 4 * numbers(*shape, seed=1, dtype=dtype), numbers(*shape, seed=2, dtype=dtype)
    place = data.draw(layouts(len(shape)))
    found, grad = with_gradients(lambda x: function(x, dim), placed([value], dtype, [place]), upstream.to(dtype).npu())
    # exp makes an error of |x - max| roundings out of that of the subtraction; the sum and exp itself add a few.
    count = 2 * (value.amax(dim, keepdim=True) - value) + shape[dim] + 8
    if logarithm:
        expected, _ = with_gradients(lambda x: function(x, dim), float64([value]), upstream)
        agree_rounded_once(found, expected, count + expected.abs())
    else:
        expected, _ = with_gradients(lambda x: function(x, dim), float64([value]), upstream)
        agree_rounded_once(found, expected, count * expected)
    # The gradient is a function of the result that was kept, which is rounded.
    kept = found.cpu().double()
    weights = kept.exp() if logarithm else kept
    if logarithm:
        true = upstream - weights * upstream.sum(dim, keepdim=True)
        magnitude = upstream.abs() + weights * upstream.abs().sum(dim, keepdim=True)
    else:
        true = weights * (upstream - (upstream * weights).sum(dim, keepdim=True))
        magnitude = weights * (upstream.abs() + (upstream * weights).abs().sum(dim, keepdim=True))
    agree_rounded_once(grad, true, (shape[dim] + 8 + (kept.abs() if logarithm else 0)) * magnitude)


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_softmax_of_bf16_can_be_asked_for_in_float32(function, dtype):
    value = numbers(4, 9, seed=1, dtype=dtype)
    found = function(on_npu(value, dtype), -1, dtype=torch.float32)
    assert found.dtype == torch.float32
    agree_rounded_once(found, function(value, -1), 40 * (1 + function(value, -1).abs()))


@pytest.mark.parametrize("dtype", FLOATING)
def test_what_is_masked_with_the_smallest_number_gets_nothing(dtype):
    value = numbers(2, 5, seed=1, dtype=dtype)
    value[:, 3:] = torch.finfo(dtype).min
    found = torch.softmax(on_npu(value, dtype), -1).cpu()
    assert (found[:, 3:] == 0).all()
    assert torch.allclose(found.double().sum(-1), torch.ones(2, dtype=torch.float64), atol=3 * torch.finfo(dtype).eps)
