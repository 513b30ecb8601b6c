"""Copies between layouts and types."""

import math

import pytest
import torch
import torch_npu
from agreement import layouts, numbers, on_npu
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
@settings(max_examples=8)
@given(st.data())
def test_a_cast_is_that_of_the_cpu(source, target, data):
    value = numbers(3, 5, seed=6).mul(20)
    if torch.uint8 in (source, target):
        value = value.abs()  # what becomes of a negative number is not defined
    value = value.to(source)
    placed = on_npu(value, source, data.draw(layouts(2)))
    assert torch.equal(placed.to(target).cpu(), value.to(target))
    assert torch.equal(torch_npu.npu_dtype_cast(placed, target).cpu(), value.to(target))
    out = on_npu(torch.zeros(3, 5), target, data.draw(layouts(2)))
    assert torch.equal(out.copy_(placed).cpu(), value.to(target))


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16], ids=str)
def test_a_cast_rounds_to_the_nearest_even_and_overflows_to_infinity(target):
    half = torch.finfo(target).eps / 2
    value = torch.tensor([1 + half, 1 + 3 * half, 1 + 1.01 * half, math.nan, math.inf, -math.inf, 3.4e38, 1e-45])
    found = value.npu().to(target).cpu().double()
    expected = [1, 1 + 4 * half, 1 + 2 * half, math.nan, math.inf, -math.inf, math.inf]
    torch.testing.assert_close(found[:7], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=0, equal_nan=True)
    assert float(found[7]) < 1e-40


@settings(max_examples=30)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.data())
def test_contiguous_and_clone_keep_the_numbers(shape, data):
    value = numbers(*shape, seed=7, dtype=torch.float32)
    placed = on_npu(value, torch.float32, data.draw(layouts(len(shape))))
    order = data.draw(st.permutations(range(len(shape))))
    for copy in (placed.permute(order).contiguous(), placed.permute(order).clone()):
        assert torch.equal(copy.cpu().double(), value.permute(order))
    assert placed.permute(order).contiguous().is_contiguous()
    assert placed.permute(order).reshape(-1).cpu().double().tolist() == value.permute(order).reshape(-1).tolist()


@settings(max_examples=30)
@given(st.data())
def test_a_copy_into_a_part_leaves_the_rest(data):
    whole = torch.arange(42.0, device="npu").reshape(6, 7)
    top, left = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 6))
    part = whole[top:, left :: data.draw(st.sampled_from((1, 2)))]
    expected = torch.arange(42.0).reshape(6, 7)
    expected.as_strided(part.shape, part.stride(), part.storage_offset()).fill_(-1)
    part.copy_(torch.full(part.shape[-1:], -1.0, device="npu"))
    assert torch.equal(whole.cpu(), expected)


def test_an_expanded_tensor_is_copied_out_in_full():
    row = torch.arange(4.0, device="npu")
    assert row.expand(3, 4).contiguous().tolist() == [[0, 1, 2, 3]] * 3
    assert row[:, None].expand(4, 2).to(torch.bfloat16).tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
