"""The masked softmax agrees with float64. (npu_scaled_masked_softmax of torch_npu is an aclop operator on 910B.)"""

import torch
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
