"""Tensors reach an NPU and come back."""

import torch
from agreement import agree, layouts, numbers, on_npu
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_tensor_of_any_layout_comes_back(shape, data):
    value = numbers(*shape, seed=1, dtype=torch.float32)
    agree(on_npu(value, torch.float32, data.draw(layouts(len(shape)))), value, roundings=0)
