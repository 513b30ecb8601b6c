"""Tensors made on an NPU are those made on the CPU."""

import pytest
import torch
from agreement import FLOATING, agree, layouts, numbers, on_npu
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = (*FLOATING, torch.int64, torch.int32, torch.bool)

CREATE = {
    "zeros": lambda device, dtype: torch.zeros(3, 4, device=device, dtype=dtype),
    "ones": lambda device, dtype: torch.ones(3, 4, device=device, dtype=dtype),
    "empty ones": lambda device, dtype: torch.ones(0, 4, device=device, dtype=dtype),
    "full": lambda device, dtype: torch.full((3, 4), 1, device=device, dtype=dtype),
    "eye": lambda device, dtype: torch.eye(3, device=device, dtype=dtype),
    "wide eye": lambda device, dtype: torch.eye(3, 5, device=device, dtype=dtype),
    "zeros_like": lambda device, dtype: torch.zeros_like(torch.empty(2, 3, device=device, dtype=dtype)),
    "ones_like": lambda device, dtype: torch.ones_like(torch.empty(2, 3, device=device, dtype=dtype)),
    "full_like": lambda device, dtype: torch.full_like(torch.empty(2, 3, device=device, dtype=dtype), 1),
    "new_full": lambda device, dtype: torch.empty(2, device=device, dtype=dtype).new_full((5,), 1),
    "new_zeros": lambda device, dtype: torch.empty(2, device=device, dtype=dtype).new_zeros(5),
    "scalar": lambda device, dtype: torch.tensor(1, device=device, dtype=dtype),
}


@pytest.mark.parametrize("name", CREATE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_constant_tensor_is_that_of_the_cpu(name, dtype):
    found, expected = CREATE[name]("npu", dtype), CREATE[name]("cpu", dtype)
    assert found.device.type == "npu"
    assert found.dtype == expected.dtype
    assert torch.equal(found.cpu(), expected)


@settings(max_examples=60)
@given(st.data())
def test_arange_counts_as_on_the_cpu(data):
    dtype = data.draw(st.sampled_from((None, *FLOATING, torch.int64, torch.int32)))
    start, step = data.draw(st.integers(-9, 9)), data.draw(st.sampled_from((1, 2, -1, -3)))
    end = start + step * data.draw(st.integers(0, 9)) + data.draw(st.sampled_from((0, 1 if step > 0 else -1)))
    found = torch.arange(start, end, step, dtype=dtype, device="npu")
    expected = torch.arange(start, end, step, dtype=dtype)
    assert found.dtype == expected.dtype
    assert torch.equal(found.cpu(), expected)


@given(st.floats(-5, 5, width=16), st.integers(0, 20), st.sampled_from((0.25, 0.5, -0.75)))
def test_arange_counts_in_fractions(start, count, step):
    found = torch.arange(start, start + step * count, step, device="npu")
    agree(found, start + step * torch.arange(count, dtype=torch.float64), abs(start) + abs(step) * torch.arange(count))


@given(st.integers(0, 12), st.sampled_from(FLOATING), st.floats(-8, 8, width=16), st.floats(-8, 8, width=16))
def test_linspace_divides_evenly(steps, dtype, start, end):
    found = torch.linspace(start, end, steps, dtype=dtype, device="npu")
    # The step is rounded to the type before it is multiplied by up to `steps`.
    magnitude = torch.full((steps,), (abs(start) + abs(end)) * (1 + steps / 2), dtype=torch.float64)
    agree(found, torch.linspace(start, end, steps, dtype=torch.float64), magnitude)


def test_logspace_has_equal_quotients():
    found = torch.logspace(-2, 3, 11, base=2, device="npu")
    agree(
        found, torch.logspace(-2, 3, 11, base=2, dtype=torch.float64), roundings=8
    )  # the exponent is rounded: 3 units


def test_range_includes_its_end():
    with pytest.warns(UserWarning, match="range"):
        assert torch.range(1, 2, 0.25, device="npu").tolist() == [1, 1.25, 1.5, 1.75, 2]


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=4), st.integers(-6, 6), st.sampled_from(DTYPES), st.data())
def test_a_triangle_of_any_layout_is_that_of_the_cpu(shape, diagonal, dtype, data):
    value = numbers(*shape, seed=8).mul(9).to(dtype)
    placed = on_npu(value, dtype, data.draw(layouts(len(shape))))
    assert torch.equal(placed.tril(diagonal).cpu(), value.tril(diagonal))
    assert torch.equal(placed.triu(diagonal).cpu(), value.triu(diagonal))
    assert torch.equal(placed.clone().triu_(diagonal).cpu(), value.triu(diagonal))
    assert torch.equal(placed.tril_(diagonal).cpu(), value.tril(diagonal))


@settings(max_examples=40)
@given(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES), st.data())
def test_filling_a_tensor_of_any_layout_leaves_what_is_around_it(shape, dtype, data):
    placed = on_npu(numbers(*shape, seed=9), dtype, data.draw(layouts(len(shape))))
    around = torch.zeros(0, dtype=dtype, device="npu").set_(placed.untyped_storage())
    before = around.cpu()
    mine = torch.zeros_like(before, dtype=torch.bool)
    mine.as_strided(placed.shape, placed.stride(), placed.storage_offset()).fill_(True)
    one = torch.ones((), dtype=dtype, device="npu")
    for fill, value in ((lambda: placed.fill_(1), 1), (lambda: placed.zero_(), 0), (lambda: placed.fill_(one), 1)):
        assert torch.equal(fill().cpu(), torch.full(shape, value, dtype=dtype))
        assert torch.equal(around.cpu()[~mine], before[~mine])


@pytest.mark.parametrize("shape", [(3, 3), (2, 5), (7, 3)], ids=str)
@pytest.mark.parametrize("wrap", [False, True])
def test_a_diagonal_is_filled_as_on_the_cpu(shape, wrap):
    expected = torch.zeros(shape).fill_diagonal_(2.5, wrap=wrap)
    assert torch.equal(torch.zeros(shape, device="npu").fill_diagonal_(2.5, wrap=wrap).cpu(), expected)


def test_ones_and_zeros_have_no_gradient_of_their_own_but_take_one():
    weight = torch.ones(3, device="npu", requires_grad=True)
    (weight * 2).backward(torch.ones(3, device="npu"))
    assert weight.grad.tolist() == [2, 2, 2]
