"""Comparisons and logic on NPUs are exactly those of the CPU."""

import math

import pytest
import torch
from agreement import FLOATING, layouts, on_npu, rounded
from hypothesis import given, settings
from hypothesis import strategies as st

WHOLE = (torch.int64, torch.int32, torch.int8, torch.uint8)
SPECIAL = (0.0, -0.0, 1.0, -1.0, 2.5, math.inf, -math.inf, math.nan)
VALUES = st.lists(st.sampled_from(SPECIAL), min_size=12, max_size=12).map(
    lambda values: torch.tensor(values, dtype=torch.float64).reshape(3, 4)
)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@pytest.mark.parametrize("name", COMPARISONS)
@settings(max_examples=30)
@given(st.data())
def test_numbers_compare_as_on_the_cpu(name, data):
    dtype = data.draw(st.sampled_from(FLOATING))
    a, b = data.draw(VALUES), data.draw(VALUES)[: data.draw(st.sampled_from((1, 3)))]
    on_a, on_b = (on_npu(value, dtype, data.draw(layouts(2))) for value in (a, b))
    expected = getattr(torch, name)(a, b)
    found = getattr(torch, name)(on_a, on_b)
    assert found.dtype == torch.bool
    assert torch.equal(found.cpu(), expected)
    out = on_npu(torch.zeros(3, 4), torch.bool, data.draw(layouts(2)))
    assert torch.equal(getattr(torch, name)(on_a, on_b, out=out).cpu(), expected)
    for scalar in (0, 1, 2.5, math.inf):
        assert torch.equal(getattr(torch, name)(on_a, scalar).cpu(), getattr(torch, name)(a, scalar))
    assert torch.equal(getattr(on_a.clone(), f"{name}_")(1).cpu().double(), getattr(torch, name)(a, 1).double())
    assert torch.equal(getattr(on_a, f"{name}_")(on_b).cpu().double(), expected.double())


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_whole_numbers_compare_as_on_the_cpu(name, dtype):
    a, b = torch.arange(6, dtype=dtype), torch.tensor([3, 1, 2, 3, 9, 5], dtype=dtype)
    assert torch.equal(getattr(torch, name)(a.npu(), b.npu()).cpu(), getattr(torch, name)(a, b))
    for scalar in (3, 2.5):
        assert torch.equal(getattr(torch, name)(a.npu(), scalar).cpu(), getattr(torch, name)(a, scalar))


def test_large_whole_numbers_are_told_apart():
    value = torch.tensor([2**53, 2**53 + 1])
    assert (value.npu() == 2**53 + 1).tolist() == [False, True]
    assert (value.npu() == value.flip(0).npu()).tolist() == [False, False]


@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor"])
@settings(max_examples=20)
@given(st.data())
def test_truth_values_combine_as_on_the_cpu(name, data):
    dtype = data.draw(st.sampled_from((*FLOATING, torch.int64, torch.bool)))
    a, b = (data.draw(VALUES).nan_to_num(0, 3, -3).to(dtype) for _ in range(2))
    on_a, on_b = (on_npu(value, dtype, data.draw(layouts(2))) for value in (a, b))
    assert torch.equal(getattr(torch, name)(on_a, on_b).cpu(), getattr(torch, name)(a, b))
    assert torch.equal(torch.logical_not(on_a).cpu(), torch.logical_not(a))
    expected = getattr(a.clone(), f"{name}_")(b)
    assert torch.equal(getattr(on_a, f"{name}_")(on_b).cpu(), expected)
    assert torch.equal(on_a.logical_not_().cpu(), expected.logical_not())


BITWISE = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a, b: ~a,
    "and_": lambda a, b: a.clone().__iand__(b),
    "or_": lambda a, b: a.clone().__ior__(b),
    "xor_": lambda a, b: a.clone().__ixor__(b),
    "bitwise_and_": lambda a, b: a.clone().bitwise_and_(b),
    "bitwise_xor_": lambda a, b: a.clone().bitwise_xor_(b),
}
SHIFTS = {
    "left": lambda a, b: a << b,
    "right": lambda a, b: a >> b,
    "left_": lambda a, b: a.clone().__ilshift__(b),
    "right_": lambda a, b: a.clone().__irshift__(b),
    "bitwise_left_shift": torch.bitwise_left_shift,
    "bitwise_right_shift": torch.bitwise_right_shift,
}


@pytest.mark.parametrize("name", BITWISE)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_bits_combine_as_on_the_cpu(name, dtype):
    a, b = torch.tensor([0, 1, 5, 127, 6]).to(dtype), torch.tensor([1, 1, 3, 64, 0]).to(dtype)
    assert torch.equal(BITWISE[name](a.npu(), b.npu()).cpu(), BITWISE[name](a, b))
    scalar = True if dtype == torch.bool else 3
    assert torch.equal(BITWISE[name](a.npu(), scalar).cpu(), BITWISE[name](a, scalar))


@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_bits_shift_as_on_the_cpu(name, dtype):
    a, b = torch.tensor([1, 5, -7, 1024], dtype=dtype), torch.tensor([0, 3, 1, 2], dtype=dtype)
    assert torch.equal(SHIFTS[name](a.npu(), b.npu()).cpu(), SHIFTS[name](a, b))
    assert torch.equal(SHIFTS[name](a.npu(), 2).cpu(), SHIFTS[name](a, 2))


@pytest.mark.parametrize("name", ["isfinite", "isinf", "isnan", "isposinf", "isneginf", "signbit"])
@given(st.data())
def test_numbers_that_are_not_finite_are_found(name, data):
    dtype, value = data.draw(st.sampled_from(FLOATING)), data.draw(VALUES)
    found = getattr(torch, name)(on_npu(value, dtype, data.draw(layouts(2))))
    assert torch.equal(found.cpu(), getattr(torch, name)(value))
    limits = torch.finfo(dtype)
    ends = torch.tensor([limits.max, limits.min, limits.tiny, limits.smallest_normal / 2], dtype=dtype)
    assert torch.equal(getattr(torch, name)(ends.npu()).cpu(), getattr(torch, name)(ends.double()))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool], ids=str)
def test_whole_numbers_are_finite(dtype):
    value = torch.tensor([0, 1, 1]).to(dtype).npu()
    assert value.isfinite().tolist() == [True] * 3
    assert value.isinf().tolist() == value.isnan().tolist() == [False] * 3


@settings(max_examples=40)
@given(st.data())
def test_tensors_are_equal_if_all_their_elements_are(data):
    dtype, value = data.draw(st.sampled_from(FLOATING)), data.draw(VALUES).nan_to_num(7)
    value = rounded(value, dtype)
    placed, other = (on_npu(value, dtype, data.draw(layouts(2))) for _ in range(2))
    assert torch.equal(placed, other)
    row, column = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 3))
    other[row, column] = 5
    assert not torch.equal(placed, other)
    assert not torch.equal(placed, placed[:, :3])


def test_not_a_number_equals_nothing():
    value = torch.tensor([1.0, math.nan], device="npu")
    assert not torch.equal(value, value.clone())


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_isclose_is_that_of_the_cpu(dtype):
    a, b = torch.tensor(SPECIAL, dtype=dtype), torch.tensor(SPECIAL, dtype=dtype).roll(1)
    b[2] = 1.01
    for tolerances in ({}, {"rtol": 0.02}, {"atol": 0.5}, {"equal_nan": True}):
        for other in (a, b):
            found = torch.isclose(a.npu(), other.npu(), **tolerances)
            assert torch.equal(found.cpu(), torch.isclose(a, other, **tolerances))
