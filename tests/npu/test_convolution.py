"""Convolutions, pools of windows, triangular systems and the loss of connectionist temporal classification."""

import pytest
import torch
from accumulation import agree_rounded_once, check_multilinear, float64, placed, with_gradients
from agreement import CONTIGUOUS, FLOATING, layouts, numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}


@st.composite
def convolutions(draw, transposed: bool):
    """A convolution as a function of its tensors, their shapes, and the most terms of a sum forward and backward."""
    dims, groups, batch = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 3))), draw(st.integers(1, 2))
    stride, padding, dilation = ([draw(st.integers(least, 2)) for _ in range(dims)] for least in (1, 0, 1))
    kernel = [draw(st.integers(1, 3)) for _ in range(dims)]
    spatial = [draw(st.integers(each * step + 1, each * step + 3)) for each, step in zip(kernel, dilation, strict=True)]
    ins, outs = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    weight = [ins, outs // groups, *kernel] if transposed else [outs, ins // groups, *kernel]
    shapes = [[batch, ins, *spatial], weight, *([[outs]] if draw(st.booleans()) else [])]
    places = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:
        places["output_padding"] = [draw(st.integers(0, step - 1)) for step in stride]
    function = (TRANSPOSED if transposed else CONVOLUTIONS)[dims]
    elements = [torch.Size(shape).numel() for shape in shapes]
    return lambda *tensors: function(*tensors, **places), shapes, elements[1] * 2 + elements[0] * 3**dims


@pytest.mark.parametrize("transposed", [False, True], ids=["straight", "transposed"])
@settings(max_examples=30)
@given(st.data(), st.sampled_from(FLOATING))
def test_a_convolution_and_its_gradients_sum_in_float32_and_round_once(transposed, data, dtype):
    function, shapes, terms = data.draw(convolutions(transposed))
    values = [numbers(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
    check_multilinear(function, values, dtype, [data.draw(layouts(value.dim())) for value in values], terms)


@settings(max_examples=15)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 9), st.sampled_from(FLOATING))
def test_a_causal_depthwise_convolution_sees_no_later_token(channels, width, length, dtype):
    values = [numbers(2, channels, length, seed=1, dtype=dtype), numbers(channels, 1, width, seed=2, dtype=dtype)]

    def causal(x, weight):
        return functional.conv1d(x, weight, padding=width - 1, groups=channels)[..., :length]

    check_multilinear(causal, values, dtype, [CONTIGUOUS] * 2, terms=2 * length * width)


@settings(max_examples=20)
@given(st.data(), st.sampled_from(FLOATING))
def test_pools_of_windows_and_their_gradients(data, dtype):
    size, stride = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    x = numbers(2, 3, data.draw(st.integers(4, 7)), data.draw(st.integers(4, 7)), seed=1, dtype=dtype)
    padding, ceil_mode = data.draw(st.integers(0, size // 2)), data.draw(st.booleans())
    layout = data.draw(layouts(4))
    windows = {"stride": stride, "padding": padding, "ceil_mode": ceil_mode}
    check_multilinear(lambda t: functional.avg_pool2d(t, size, **windows), [x], dtype, [layout], terms=32)
    check_multilinear(lambda t: functional.adaptive_avg_pool2d(t, 2), [x], dtype, [layout], terms=64)
    upstream = numbers(*functional.max_pool2d(x, size, **windows).shape, seed=2, dtype=dtype)

    def largest(t):
        return functional.max_pool2d(t, size, **windows)

    found = with_gradients(largest, placed([x], dtype, [layout]), upstream.to(dtype).npu())
    expected = with_gradients(largest, float64([x]), upstream)
    for mine, true in zip(found, expected, strict=True):
        agree_rounded_once(mine, true, 16 * true)


@settings(max_examples=20)
@given(st.integers(1, 9), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_a_triangular_system_and_its_gradients(n, columns, upper, left, unit):
    a, b = numbers(2, n, n, seed=1) / n, numbers(*((2, n, columns) if left else (2, columns, n)), seed=2)
    a = a + 2 * torch.eye(n, dtype=a.dtype)

    def solve(matrix, right):
        return torch.linalg.solve_triangular(matrix, right, upper=upper, left=left, unitriangular=unit)

    upstream = numbers(*b.shape, seed=3)
    found = with_gradients(solve, placed([a, b], torch.float32, [CONTIGUOUS] * 2), upstream.float().npu())
    expected = with_gradients(solve, float64([a, b]), upstream)
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu().double(), true, rtol=1e-5, atol=1e-5 * true.abs().max().item())


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_connectionist_temporal_classification(reduction, zero_infinity):
    steps, samples, classes = 9, 3, 6
    scores = numbers(steps, samples, classes, seed=1)
    generator = torch.Generator().manual_seed(2)
    target = torch.randint(1, classes, (samples, 4), generator=generator)
    lengths, of_target = torch.tensor([9, 8, 7]), torch.tensor([4, 2, 3])

    def loss(t):
        log_probs = t.log_softmax(-1)
        return functional.ctc_loss(
            log_probs, target.to(t.device), lengths, of_target, reduction=reduction, zero_infinity=zero_infinity
        )

    upstream = numbers(*loss(scores).shape, seed=3)
    found = with_gradients(loss, placed([scores], torch.float32, [CONTIGUOUS]), upstream.float().npu())
    expected = with_gradients(loss, float64([scores]), upstream)
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu().double(), true, rtol=1e-5, atol=1e-5)
