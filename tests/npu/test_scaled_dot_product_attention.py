"""torch's scaled_dot_product_attention, which torch_npu makes of npu_fusion_attention, agrees with float64."""

import pytest
import torch
from agreement import FLOATING, agree, layouts, numbers, on_npu
from attention_reference import attention, hidden_in_mode
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

SIZE = 16


def check(sizes, dtype, seed, hidden, *, strided=(None, None, None), **options):
    batch, heads, group, rows, keys = sizes
    shapes = ((heads * group, rows), (heads, keys), (heads, keys), (heads * group, rows))
    query, key, value, upstream = (
        numbers(batch, n, length, SIZE, seed=seed + i, dtype=dtype) for i, (n, length) in enumerate(shapes)
    )
    on = [
        on_npu(tensor, dtype, layout).requires_grad_()
        for tensor, layout in zip((query, key, value), strided, strict=True)
    ]
    out = scaled_dot_product_attention(*on, **options)
    scale = options.get("scale", SIZE**-0.5)
    wanted = attention(query, key, value, upstream, hidden, scale=scale, dtype=dtype)
    agree(out, wanted.out, wanted.magnitudes["out"])
    gradients = torch.autograd.grad(out, on, on_npu(upstream, dtype))
    for name, gradient in zip(("query", "key", "value"), gradients, strict=True):
        agree(gradient, wanted.gradients[name], wanted.magnitudes[name])


sizes = st.tuples(
    st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), st.sampled_from((1, 7, 33)), st.sampled_from((1, 8, 40))
)


@settings(max_examples=30)
@given(sizes, st.sampled_from(FLOATING), st.booleans(), st.tuples(*[layouts(4)] * 3), st.integers(0, 99))
def test_it_agrees_with_float64_causal_or_not(sizes, dtype, is_causal, strided, seed):
    *_, group, rows, keys = sizes
    hidden = hidden_in_mode(2, rows, keys) if is_causal else torch.zeros(rows, keys, dtype=torch.bool)
    check(sizes, dtype, seed, hidden, strided=strided, is_causal=is_causal, enable_gqa=group > 1)


@settings(max_examples=30)
@given(
    sizes,
    st.sampled_from(FLOATING),
    st.sampled_from(((1, 1), (0, 1), (1, 0), (0, 0), None)),
    st.integers(0, 99),
)
def test_it_agrees_with_float64_with_a_mask_that_is_broadcast(sizes, dtype, broadcast, seed):
    batch, heads, group, rows, keys = sizes
    shape = (rows, keys)
    if broadcast is not None:
        shape = (1 if broadcast[0] else batch, 1 if broadcast[1] else heads * group, rows, keys)
    hidden = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.3
    hidden[..., 0] = False
    check(sizes, dtype, seed, hidden, attn_mask=(~hidden).npu(), enable_gqa=group > 1)


@pytest.mark.parametrize("dtype", FLOATING)
def test_the_scale_may_be_given(dtype):
    check((1, 2, 1, 5, 6), dtype, 1, torch.zeros(5, 6, dtype=torch.bool), scale=0.7)


def test_a_row_that_a_mask_hides_wholly_is_zero():
    hidden = torch.zeros(4, 5, dtype=torch.bool)
    hidden[1] = True
    check((1, 1, 1, 4, 5), torch.float32, 1, hidden, attn_mask=(~hidden).npu())
