"""The rotary operators agree with float64, and their gradients with autograd."""

import pytest
import torch
import torch_npu
from agreement import FLOATING, agree, layouts, numbers, on_npu
from hypothesis import given, settings
from hypothesis import strategies as st

# how cos and sin may be smaller than the input: which of its first three dims they have
BROADCASTS = {
    "BNSD": ((0, 0, 1), (1, 0, 1), (1, 1, 1)),
    "BSND": ((0, 1, 0), (1, 1, 0), (1, 1, 1)),
    "SBND": ((1, 0, 0), (1, 1, 0), (1, 1, 1)),
}


def turned(x: torch.Tensor, mode: str) -> torch.Tensor:
    """The vector a quarter turn on from ``x`` in every pair of dims."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)
    if mode == "quarter":
        return torch.cat([turned(part, "half") for part in x.chunk(2, -1)], -1)
    assert mode == "interleave", mode
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def rotary(x, cos, sin, mode):
    return x * cos + turned(x, mode) * sin


def size_of_terms(x, cos, sin, mode):
    return (x * cos).abs() + (turned(x, mode) * sin).abs()


@st.composite
def inputs(draw):
    layout = draw(st.sampled_from(sorted(BROADCASTS)))
    shape = [draw(st.integers(1, 4)) for _ in range(3)] + [draw(st.sampled_from((2, 8, 24)))]
    kept = draw(st.sampled_from(BROADCASTS[layout]))
    angle_shape = [size if keep else 1 for size, keep in zip(shape, (*kept, 1), strict=True)]
    return shape, angle_shape


@settings(max_examples=60)
@given(
    inputs(),
    st.sampled_from(("half", "interleave")),
    st.sampled_from(FLOATING),
    layouts(4),
    layouts(4),
    st.integers(0, 99),
)
def test_rotary_mul_and_its_gradients_agree_with_float64(shapes, mode, dtype, layout, angle_layout, seed):
    shape, angle_shape = shapes
    x, upstream = numbers(*shape, seed=seed, dtype=dtype), numbers(*shape, seed=seed + 1, dtype=dtype)
    cos, sin = numbers(*angle_shape, seed=seed + 2, dtype=dtype), numbers(*angle_shape, seed=seed + 3, dtype=dtype)
    wanted = [tensor.clone().requires_grad_() for tensor in (x, cos, sin)]
    found = [
        on_npu(tensor, dtype, one).requires_grad_()
        for tensor, one in ((x, layout), (cos, angle_layout), (sin, angle_layout))
    ]
    out = torch_npu.npu_rotary_mul(*found, mode)
    agree(out, rotary(*wanted, mode).detach(), size_of_terms(x, cos, sin, mode))
    expected = torch.autograd.grad(rotary(*wanted, mode), wanted, upstream)
    gradients = torch.autograd.grad(out, found, on_npu(upstream, dtype))
    terms = [
        (upstream * cos).abs() + turned(upstream * sin, mode).abs(),
        (upstream * x).abs().sum_to_size(angle_shape),
        (upstream * turned(x, mode)).abs().sum_to_size(angle_shape),
    ]
    for one, wanted_one, magnitude in zip(gradients, expected, terms, strict=True):
        agree(one, wanted_one, magnitude, roundings=4)  # in float32 sums of up to 64 terms, rounded pairwise


@settings(max_examples=20)
@given(inputs(), st.sampled_from(FLOATING), st.integers(0, 99))
def test_the_input_alone_can_have_a_gradient(shapes, dtype, seed):
    shape, angle_shape = shapes
    x, upstream = numbers(*shape, seed=seed, dtype=dtype), numbers(*shape, seed=seed + 1, dtype=dtype)
    cos, sin = numbers(*angle_shape, seed=seed + 2, dtype=dtype), numbers(*angle_shape, seed=seed + 3, dtype=dtype)
    found = on_npu(x, dtype).requires_grad_()
    out = torch_npu.npu_rotary_mul(found, on_npu(cos, dtype), on_npu(sin, dtype))
    (gradient,) = torch.autograd.grad(out, found, on_npu(upstream, dtype))
    expected = upstream * cos - turned(upstream * sin, "half")
    agree(gradient, expected, (upstream * cos).abs() + turned(upstream * sin, "half").abs())


@pytest.mark.parametrize("dtype", FLOATING)
def test_a_rotation_matrix_takes_the_place_of_the_mode(dtype):
    x, cos, sin = (numbers(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(2, 3, 5, 8)] + [(1, 1, 5, 8)] * 2))
    matrix = numbers(8, 8, seed=9, dtype=dtype)
    out = torch_npu.npu_rotary_mul(*(on_npu(t, dtype) for t in (x, cos, sin)), "half", on_npu(matrix, dtype))
    agree(out, x * cos + (x @ matrix) * sin, (x * cos).abs() + (x.abs() @ matrix.abs()) * sin.abs(), roundings=8)


@settings(max_examples=30)
@given(
    st.sampled_from(("BSND", "SBND", "BNSD", "TND")),
    st.sampled_from(("half", "interleave", "quarter")),
    st.sampled_from(FLOATING),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_apply_rotary_pos_emb_turns_query_and_key_in_place(layout, mode, dtype, key_heads, seed):
    sizes = {"B": 2, "S": 5, "T": 7, "D": 16}
    query, key, cos, sin = (
        numbers(*(heads if dim == "N" else sizes[dim] for dim in layout), seed=seed + i, dtype=dtype)
        for i, heads in enumerate((4, key_heads, 1, 1))
    )
    on = [on_npu(tensor, dtype) for tensor in (query, key, cos, sin)]
    results = torch_npu.npu_apply_rotary_pos_emb(*on, layout, mode)
    for result, given_, x in zip(results, on, (query, key), strict=False):
        agree(result, rotary(x, cos, sin, mode), size_of_terms(x, cos, sin, mode))
        agree(given_, rotary(x, cos, sin, mode), size_of_terms(x, cos, sin, mode))


@pytest.mark.parametrize("rows", (1, 5))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_interleave_rope_puts_the_members_of_a_pair_half_the_dims_apart(dtype, rows):
    x = numbers(2, 3, 5, 64, seed=1, dtype=dtype)
    cos, sin = (numbers(2, 1, rows, 64, seed=i, dtype=dtype) for i in (2, 3))
    apart = torch.cat([x[..., ::2], x[..., 1::2]], -1)
    out = torch_npu.npu_interleave_rope(*(on_npu(t, dtype) for t in (x, cos, sin)))
    agree(out, rotary(apart, cos, sin, "half"), size_of_terms(apart, cos, sin, "half"))


def test_no_rows_are_turned():
    x, angle = torch.zeros(2, 0, 3, 8).npu(), torch.zeros(1, 0, 1, 8).npu()
    assert torch_npu.npu_rotary_mul(x, angle, angle).shape == x.shape
