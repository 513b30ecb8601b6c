"""Tensors put together, taken apart, repeated, moved round and padded."""

import pytest
import torch
from accumulation import check_multilinear, same
from agreement import FLOATING, layouts, numbers, on_npu
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

DTYPES = (*FLOATING, torch.int64, torch.int32, torch.bool)

REARRANGEMENTS = {
    "cat": lambda a, b: torch.cat([a, b], 0),
    "cat of the last dim": lambda a, b: torch.cat([a, b, a], -1),
    "stack": lambda a, b: torch.stack([a, b], 1),
    "repeat": lambda a, b: a.repeat(2, 1, 3),
    "repeat of the same rank": lambda a, b: a.repeat(1, 3),
    "repeat_interleave": lambda a, b: a.repeat_interleave(3),
    "repeat_interleave of a dim": lambda a, b: a.repeat_interleave(2, dim=0),
    "flip": lambda a, b: a.flip([0, 1]),
    "roll": lambda a, b: a.roll((1, -2), (0, 1)),
    "roll of all": lambda a, b: a.roll(3),
    "pad": lambda a, b: functional.pad(a, (1, 2, 0, 3)),
    "pad less": lambda a, b: functional.pad(a, (-1, 2)),
    "expand": lambda a, b: a[:, :1].expand(a.shape[0], 5).contiguous(),
    "transpose": lambda a, b: a.T.contiguous(),
    "permute": lambda a, b: torch.stack([a, b]).permute(2, 0, 1).contiguous(),
    "slice": lambda a, b: a[1:, ::2].contiguous(),
    "select": lambda a, b: a[0].contiguous(),
    "split": lambda a, b: a.split([1, a.shape[0] - 1])[1].contiguous(),
    "unfold": lambda a, b: a.unfold(1, 2, 1).contiguous(),
    "masked_fill": lambda a, b: a.masked_fill(torch.eye(*a.shape, dtype=torch.bool).to(a.device), 0),
}


@pytest.mark.parametrize("name", REARRANGEMENTS)
@settings(max_examples=20)
@given(st.integers(2, 5), st.integers(2, 5), st.sampled_from(DTYPES), st.data())
def test_a_rearrangement_is_exact(name, m, n, dtype, data):
    values = [numbers(m, n, seed=seed).round().clamp(0, 1 if dtype == torch.bool else 9) for seed in (1, 2)]
    found = REARRANGEMENTS[name](*[on_npu(value, dtype, data.draw(layouts(2))) for value in values])
    assert found.dtype == dtype
    same(found, REARRANGEMENTS[name](*values))


@pytest.mark.parametrize("name", REARRANGEMENTS)
@settings(max_examples=15)
@given(st.integers(2, 4), st.integers(2, 4), st.sampled_from(FLOATING[:1]), st.data())
def test_the_gradient_of_a_rearrangement_sums_over_the_places(name, m, n, dtype, data):
    values = [numbers(m, n, seed=seed, dtype=dtype) for seed in (1, 2)]
    both = lambda a, b: torch.cat([REARRANGEMENTS[name](a, b).flatten(), (a + b).flatten()])  # noqa: E731
    check_multilinear(both, values, dtype, [data.draw(layouts(2)) for _ in values], terms=12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_can_be_joined_and_repeated(dtype):
    some, none = torch.ones(2, 3).to(dtype), torch.ones(0, 3).to(dtype)
    same(torch.cat([some.npu(), none.npu()]), some)
    same(torch.cat([none.npu(), none.npu()]), none)
    same(torch.cat([torch.empty(0).to(dtype).npu(), some.npu()]), some)
    same(some.npu().repeat(0, 2), some.repeat(0, 2))
    same(none.npu().repeat(2, 2), none.repeat(2, 2))
    same(none.npu().flip(0), none)


def test_tensors_of_several_dtypes_are_joined_in_the_widest():
    a, b = torch.tensor([1.5]), torch.tensor([2.25])
    found = torch.cat([a.npu().bfloat16(), b.npu()])
    assert found.dtype == torch.float32
    same(found, torch.tensor([1.5, 2.25]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_elements_are_repeated_as_often_as_a_tensor_says(dtype):
    value, times = numbers(3, 4, seed=1, dtype=torch.float32), torch.tensor([2, 0, 3]).to(dtype)
    same(value.float().npu().repeat_interleave(times.npu(), dim=0), value.repeat_interleave(times, dim=0))
    flat = torch.arange(12).to(dtype)
    same(value.float().npu().repeat_interleave(flat.npu()), value.repeat_interleave(flat))
    same(torch.repeat_interleave(times.npu()), torch.repeat_interleave(times))


def test_copies_of_splits_and_chunks_are_exact():
    value = numbers(6, 4, seed=1, dtype=torch.float32)
    device = value.float().npu()
    for mine, true in zip(torch.split_with_sizes_copy(device, [1, 5]), value.split([1, 5]), strict=True):
        same(mine, true)
    for mine, true in zip(device.chunk(4), value.chunk(4), strict=True):
        same(mine, true)
    other = numbers(3, 2, seed=2, dtype=torch.float32)
    same(
        torch._chunk_cat([device, other.float().npu()], 0, 2),
        torch._chunk_cat([value, other], 0, 2),
    )


def test_parameters_are_flattened_and_unflattened():
    values = [numbers(*shape, seed=1, dtype=torch.float32) for shape in [(3, 4), (5,), (2, 2, 2)]]
    flat = torch._utils._flatten_dense_tensors([value.float().npu() for value in values])
    same(flat, torch.cat([value.flatten() for value in values]))
    for mine, true in zip(torch._utils._unflatten_dense_tensors(flat, values), values, strict=True):
        same(mine, true)


@pytest.mark.parametrize("dtype", FLOATING)
def test_patches_of_an_image_become_columns(dtype):
    value = numbers(2, 3, 5, 6, seed=1, dtype=dtype)
    found = functional.unfold(on_npu(value, dtype), (2, 3), padding=1, stride=2)
    same(found, functional.unfold(value, (2, 3), padding=1, stride=2))


def test_a_tensor_is_split_into_many_given_results():
    value = numbers(2, 33 * 2048, seed=1, dtype=torch.float32)
    results = [torch.zeros(2, 2048).npu() for _ in range(33)]
    torch.split_with_sizes_copy(value.float().npu(), [2048] * 33, 1, out=results)
    for mine, true in zip(results, value.split(2048, 1), strict=True):
        same(mine, true)
