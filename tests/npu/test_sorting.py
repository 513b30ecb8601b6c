"""Sorted order, largest elements, distinct elements, places between sorted ones."""

import pytest
import torch
from accumulation import float64, placed, same, with_gradients
from agreement import FLOATING, layouts, numbers, on_npu
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = (*FLOATING, torch.int64, torch.int32)
shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3)


def few_values(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).double()


def check_indices(indices: torch.Tensor, value: torch.Tensor, expected: torch.Tensor, dim: int) -> None:
    """``indices`` (NPU) take ``expected`` out of ``value``, each place at most once."""
    assert indices.dtype == torch.int64
    indices = indices.cpu()
    assert torch.equal(value.gather(dim, indices), expected)
    ordered = indices.sort(dim)[0]
    assert (ordered.diff(dim=dim) > 0).all()


@settings(max_examples=50)
@given(shapes, st.sampled_from(DTYPES), st.booleans(), st.data())
def test_sorting_gives_the_values_in_order_and_their_places(shape, dtype, descending, data):
    value, dim = few_values(*shape), data.draw(st.integers(-len(shape), len(shape) - 1))
    device = on_npu(value, dtype, data.draw(layouts(len(shape))))
    expected = value.sort(dim, descending)[0]
    values, indices = device.sort(dim, descending)
    same(values, expected)
    check_indices(indices, value, expected, dim)
    check_indices(device.argsort(dim, descending), value, expected, dim)


@settings(max_examples=30)
@given(shapes, st.sampled_from(DTYPES), st.booleans(), st.data())
def test_a_stable_sort_keeps_the_order_of_equal_elements(shape, dtype, descending, data):
    value, dim = few_values(*shape), data.draw(st.integers(-len(shape), len(shape) - 1))
    device = on_npu(value, dtype, data.draw(layouts(len(shape))))
    values, indices = device.sort(dim=dim, descending=descending, stable=True)
    expected = value.sort(dim=dim, descending=descending, stable=True)
    same(values, expected[0])
    same(indices, expected[1])
    same(device.argsort(dim=dim, descending=descending, stable=True), expected[1])


@settings(max_examples=50)
@given(shapes, st.sampled_from(DTYPES), st.booleans(), st.data())
def test_topk_gives_the_extreme_values_in_order_and_their_places(shape, dtype, largest, data):
    value, dim = few_values(*shape), data.draw(st.integers(-len(shape), len(shape) - 1))
    k = data.draw(st.integers(0, shape[dim]))
    values, indices = on_npu(value, dtype, data.draw(layouts(len(shape)))).topk(k, dim, largest)
    expected = value.topk(k, dim, largest)[0]
    same(values, expected)
    check_indices(indices, value, expected, dim)


@pytest.mark.parametrize("name", ["topk", "sort"])
def test_the_gradient_of_an_order_goes_back_to_the_places(name):
    function = (lambda x: x.topk(2, -1)[0]) if name == "topk" else lambda x: x.sort(-1)[0]
    value = numbers(4, 6, seed=1, dtype=torch.float32)
    upstream = numbers(*function(value).shape, seed=2, dtype=torch.float32)
    found = with_gradients(function, placed([value], torch.float32, [None]), upstream.float().npu())
    for mine, true in zip(found, with_gradients(function, float64([value]), upstream), strict=True):
        same(mine, true)


@settings(max_examples=40)
@given(shapes, st.sampled_from(DTYPES), st.data())
def test_distinct_elements_come_with_their_places_and_counts(shape, dtype, data):
    value = few_values(*shape)
    device = on_npu(value, dtype, data.draw(layouts(len(shape))))
    for mine, true in zip(
        device.unique(return_inverse=True, return_counts=True),
        value.unique(return_inverse=True, return_counts=True),
        strict=True,
    ):
        same(mine, true)
    same(device.unique(), value.unique())
    for mine, true in zip(torch._unique(device, True, True), torch._unique(value, True, True), strict=True):
        same(mine, true)
    values, counts = device.unique(return_counts=True)
    same(values, value.unique())
    same(counts, value.unique(return_counts=True)[1])


def test_distinct_rows_and_runs_are_found():
    value = few_values(12, 2).clamp(0, 1)
    device = value.float().npu()
    for mine, true in zip(
        device.unique(dim=0, return_inverse=True, return_counts=True),
        value.unique(dim=0, return_inverse=True, return_counts=True),
        strict=True,
    ):
        same(mine, true)
    for dim in (None, 0):
        for mine, true in zip(
            torch.unique_consecutive(device, return_inverse=True, return_counts=True, dim=dim),
            torch.unique_consecutive(value, return_inverse=True, return_counts=True, dim=dim),
            strict=True,
        ):
            same(mine, true)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_occurrences_are_counted(dtype):
    value = torch.tensor([3, 0, 3, 5, 1])
    same(value.to(dtype).npu().bincount(), value.bincount())
    same(value.to(dtype).npu().bincount(minlength=9), value.bincount(minlength=9))
    same(value[:0].to(dtype).npu().bincount(minlength=2), torch.zeros(2))
    weight = torch.tensor([1.0, 2, 3, 4, 5])
    same(value.to(dtype).npu().bincount(weight.npu()), value.bincount(weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int32])
def test_a_histogram_counts_what_lies_in_each_bin(dtype):
    value = few_values(30)
    same(value.to(dtype).npu().histc(8, -4, 4), value.histc(8, -4, 4))
    same(value.to(dtype).npu().histc(4), value.histc(4))


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int32])
def test_a_place_between_sorted_values_is_found(dtype, right):
    edges, value = few_values(3, 6).sort(-1)[0], few_values(3, 4, seed=2)
    device, sought = edges.to(dtype).npu(), value.to(dtype).npu()
    same(torch.searchsorted(device, sought, right=right), torch.searchsorted(edges, value, right=right))
    same(torch.searchsorted(device[0], 1, right=right), torch.searchsorted(edges[0], 1, right=right))
    same(torch.bucketize(sought, device[0], right=right), torch.bucketize(value, edges[0], right=right))
    narrow = torch.searchsorted(device, sought, out_int32=True)
    assert narrow.dtype == torch.int32
    same(narrow, torch.searchsorted(edges, value))
