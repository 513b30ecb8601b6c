"""The masked softmax agrees with float64. (npu_scaled_masked_softmax of torch_npu is an aclop operator on 910B.)"""

import torch
import torch_npu
from agreement import FLOATING, agree, layouts, numbers, on_npu
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=30)
@given(st.tuples(*[st.integers(1, 6)] * 4), st.sampled_from(FLOATING), layouts(4), layouts(4), st.integers(0, 99))
def test_masked_softmax_agrees_with_float64(shape, dtype, layout, mask_layout, seed):
    x = 3 * numbers(*shape, seed=seed, dtype=dtype)
    x = x.to(dtype).double()
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    found = torch.ops.aten._masked_softmax(on_npu(x, dtype, layout), on_npu(mask, torch.bool, mask_layout), -1, 2)
    wanted = x.masked_fill(mask, -10000.0).softmax(-1)  # what CANN writes, so that a row wholly masked is even
    agree(found, wanted, roundings=16 if dtype == torch.float32 else 2)  # float32: x of up to 9 subtracted and exp


@settings(max_examples=30)
@given(
    st.tuples(*[st.integers(1, 6)] * 4),
    st.sampled_from(FLOATING),
    layouts(4),
    st.sampled_from((1.0, 0.25)),
    st.booleans(),
    st.integers(0, 99),
)
def test_scaled_masked_softmax_and_its_gradient_agree_with_float64(shape, dtype, layout, scale, triangle, seed):
    x = numbers(*shape, seed=seed, dtype=dtype)
    upstream = numbers(*shape, seed=seed + 1, dtype=dtype)
    mask = torch.rand((shape[0], 1, *shape[2:]), generator=torch.Generator().manual_seed(seed)) < 0.4
    hidden = torch.ones(shape[2:], dtype=torch.bool).triu(1) if triangle else mask
    x_npu = on_npu(x, dtype, layout).requires_grad_()
    found = torch_npu.npu_scaled_masked_softmax(x_npu, mask.npu(), scale, triangle)
    found.backward(on_npu(upstream, dtype, layout))
    x.requires_grad_()
    wanted = (x * scale).masked_fill(hidden, -10000.0).softmax(-1)
    agree(found.detach(), wanted.detach(), roundings=16 if dtype == torch.float32 else 2)  # float32: as above
    # The gradient starts from the rounded result: two terms of |y| |dy| each.
    y = found.detach().cpu().double()
    expected = scale * y * (upstream - (upstream * y).sum(-1, keepdim=True))
    magnitude = scale * y * (upstream.abs() + (upstream * y).abs().sum(-1, keepdim=True))
    agree(x_npu.grad, expected.masked_fill(hidden, 0), magnitude, roundings=16 if dtype == torch.float32 else 2)
    true = torch.autograd.grad(wanted, x, upstream)[0]
    assert torch.allclose(x_npu.grad.cpu().double(), true, rtol=0, atol=8 * torch.finfo(dtype).eps)
