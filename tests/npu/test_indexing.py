"""Elements chosen by index or by mask: read, written, added to."""

import pytest
import torch
from accumulation import agree_rounded_once, check_multilinear, same
from agreement import FLOATING, layouts, numbers, on_npu
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

DTYPES = (*FLOATING, torch.int64, torch.int32)


def indices(*shape: int, below: int, seed: int) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).double()


def at_once(value: torch.Tensor, change) -> torch.Tensor:
    result = value.clone()
    change(result)
    return result


I = indices(3, below=4, seed=1)  # noqa: E741
J = indices(3, below=5, seed=2)
GRID = indices(4, 2, below=5, seed=3)
MASK = torch.rand(4, 5, generator=torch.Generator().manual_seed(4)) < 0.5

READS = {
    "index_select": lambda x, to: x.index_select(1, to(J)),
    "index_select int32": lambda x, to: x.index_select(0, to(I.int())),
    "gather": lambda x, to: x.gather(1, to(GRID)),
    "take_along_dim": lambda x, to: torch.take_along_dim(x, to(GRID), 1),
    "take": lambda x, to: x.take(to(J)),
    "rows": lambda x, to: x[to(I)],
    "columns": lambda x, to: x[:, to(J)],
    "negative": lambda x, to: x[to(-1 - I)],
    "points": lambda x, to: x[to(I), to(J)],
    "points of a grid": lambda x, to: x[to(I)[:, None], to(J)],
    "none": lambda x, to: x[to(I[:0])],
    "none of the columns": lambda x, to: x[:, to(J[:0])],
    "masked": lambda x, to: x[to(MASK)],
    "rows by mask": lambda x, to: x[to(MASK[:, 0])],
    "masked_select": lambda x, to: x.masked_select(to(MASK)),
    "masked_select of a row": lambda x, to: x.masked_select(to(MASK[0])),
    "masked_select of none": lambda x, to: x.masked_select(to(MASK & ~MASK)),
    "nonzero": lambda x, to: (x > 0).nonzero(),
    "nonzero of none": lambda x, to: (x > 99).nonzero(),
    "where": lambda x, to: torch.cat(torch.where(x > 0)),
    "argwhere": lambda x, to: torch.argwhere(x),
}

WRITES = {
    "scatter": lambda x, y, to: x.scatter(0, to(torch.tensor([[2, 1, 0, 3, 1]])), y),
    "scatter_": lambda x, y, to: x.scatter_(1, to(GRID[:, :1]), y),
    "scatter of a value": lambda x, y, to: x.scatter(1, to(GRID), 7),
    "scatter_ of a value": lambda x, y, to: x.scatter_(1, to(GRID), 7),
    "scatter add of values": lambda x, y, to: x.scatter(1, to(GRID), 2, reduce="add"),
    "scatter multiply": lambda x, y, to: x.scatter(1, to(GRID), y, reduce="multiply"),
    "scatter_add": lambda x, y, to: x.scatter_add(1, to(GRID), y),
    "scatter_add_": lambda x, y, to: x.scatter_add_(0, to(GRID.T.clamp(max=3)), y),
    "scatter_reduce sum": lambda x, y, to: x.scatter_reduce(1, to(GRID), y, "sum", include_self=False),
    "scatter_reduce sum to what is there": lambda x, y, to: x.scatter_reduce(1, to(GRID), y, "sum"),
    "scatter_reduce_ sum": lambda x, y, to: x.scatter_reduce_(1, to(GRID), y, "sum"),
    "scatter_reduce amax": lambda x, y, to: x.scatter_reduce(1, to(GRID), y, "amax"),
    "scatter_reduce amin": lambda x, y, to: x.scatter_reduce(1, to(GRID), y, "amin"),
    "index_add": lambda x, y, to: x.index_add(0, to(I), y[:3], alpha=2),
    "index_add_": lambda x, y, to: x.index_add_(1, to(J), y[:, :3]),
    "index_copy": lambda x, y, to: x.index_copy(0, to(torch.tensor([2, 0])), y[:2]),
    "index_copy_": lambda x, y, to: x.index_copy_(1, to(torch.tensor([4, 0])), y[:, :2]),
    "index_fill": lambda x, y, to: x.index_fill(1, to(J), 7),
    "index_fill_": lambda x, y, to: x.index_fill_(0, to(I), 7),
    "index_put": lambda x, y, to: x.index_put((to(torch.tensor([2, 0])), to(torch.tensor([1, 4]))), y[0, :2]),
    "index_put adding": lambda x, y, to: x.index_put((to(I), to(J)), y[0, :3], accumulate=True),
    "index_put adding rows": lambda x, y, to: x.index_put_((to(I),), y[:3], accumulate=True),
    "put": lambda x, y, to: x.put(to(torch.tensor([3, 11])), y[0, :2]),
    "masked_scatter": lambda x, y, to: x.masked_scatter(to(MASK), y),
    "masked_scatter_": lambda x, y, to: x.masked_scatter_(to(MASK), y),
    "rows": lambda x, y, to: at_once(x, lambda z: z.__setitem__(to(torch.tensor([2, 0])), y[:2])),
    "columns": lambda x, y, to: at_once(x, lambda z: z.__setitem__((slice(None), to(torch.tensor([4, 1]))), y[:, :2])),
    "a value": lambda x, y, to: at_once(x, lambda z: z.__setitem__(to(I), 7)),
    "none": lambda x, y, to: at_once(x, lambda z: z.__setitem__(to(I[:0]), y[:0])),
    "masked": lambda x, y, to: at_once(x, lambda z: z.__setitem__(to(MASK), y.flatten()[: int(MASK.sum())])),
    "masked value": lambda x, y, to: at_once(x, lambda z: z.__setitem__(to(MASK), 7)),
}


def npu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.npu()


def here(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@pytest.mark.parametrize("name", READS)
@settings(max_examples=15)
@given(st.sampled_from(DTYPES), layouts(2))
def test_what_is_read_by_index_is_exact(name, dtype, layout):
    value = whole_numbers(4, 5, seed=1)
    same(READS[name](on_npu(value, dtype, layout), npu), READS[name](value, here))


# Whole numbers this small are exact in every dtype, also added up.
@pytest.mark.parametrize("name", WRITES)
@settings(max_examples=15)
@given(st.sampled_from(DTYPES), layouts(2), layouts(2))
def test_what_is_written_by_index_is_exact(name, dtype, layout, other):
    value, source = whole_numbers(4, 5, seed=1), whole_numbers(4, 5, seed=2)
    found = WRITES[name](on_npu(value, dtype, layout), on_npu(source, dtype, other), npu)
    assert found.dtype == dtype
    same(found, WRITES[name](value.clone(), source, here))


def moved(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return t.to(x.device)


GRADIENTS = {
    "index_select": lambda x, y: x.index_select(0, moved(I, x)) * 1,
    "gather": lambda x, y: x.gather(1, moved(GRID, x)),
    "rows": lambda x, y: x[moved(I, x)],
    "points": lambda x, y: x[moved(I, x), moved(J, x)],
    "masked": lambda x, y: x[moved(MASK, x)],
    "slice": lambda x, y: x[1:3, ::2],
    "select": lambda x, y: x[:, 2],
    "narrow and expand": lambda x, y: x.narrow(1, 1, 1).expand(4, 6),
    "scatter_add": lambda x, y: x.scatter_add(1, moved(GRID, x), y[:, :2]),
    "index_add": lambda x, y: x.index_add(0, moved(I, x), y[:3]),
    "index_put adding": lambda x, y: x.index_put((moved(I, x),), y[:3], accumulate=True),
    "embedding": lambda x, y: functional.embedding(moved(GRID.clamp(max=3), x), x),
    "embedding with padding": lambda x, y: functional.embedding(moved(GRID.clamp(max=3), x), x, padding_idx=1),
}


@pytest.mark.parametrize("name", GRADIENTS)
@settings(max_examples=15)
@given(st.sampled_from(FLOATING), layouts(2))
def test_the_gradient_of_an_indexing_sums_in_float32(name, dtype, layout):
    values = [numbers(4, 5, seed=seed, dtype=dtype) for seed in (1, 2)]
    function = lambda x, y: torch.cat([GRADIENTS[name](x, y).flatten(), y.flatten()])  # noqa: E731
    if name in ("scatter_add", "index_add", "index_put adding"):
        function = GRADIENTS[name]
        values[1] = values[1][:4]
    check_multilinear(function, values, dtype, [layout, None], terms=12)


@pytest.mark.parametrize("dtype", FLOATING)
def test_many_gradients_of_one_row_of_an_embedding_lose_nothing(dtype):
    weight, upstream = on_npu(torch.zeros(3, 4), dtype).requires_grad_(), numbers(600, 4, seed=1, dtype=dtype).abs()
    functional.embedding(torch.ones(600, dtype=torch.long).npu(), weight).backward(on_npu(upstream, dtype))
    agree_rounded_once(weight.grad[1], upstream.sum(0), 300 * upstream.sum(0))
    same(weight.grad[0], torch.zeros(4))


@pytest.mark.parametrize("dtype", FLOATING)
def test_many_additions_to_one_place_lose_nothing(dtype):
    value, source = numbers(2, 3, seed=1, dtype=dtype).abs(), numbers(600, 3, seed=2, dtype=dtype).abs()
    index = torch.ones(600, dtype=torch.long)
    expected = value.index_add(0, index, source)
    device, more, place = on_npu(value, dtype), on_npu(source, dtype), index.npu()
    for found in (
        device.index_add(0, place, more),
        device.T.index_add(1, place, more.T).T,
        device.index_put((place,), more, accumulate=True),
        device.scatter_add(0, place[:, None].expand(600, 3), more),
    ):
        agree_rounded_once(found, expected, 300 * expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_one_hot_has_a_one_at_each_class(dtype):
    classes = torch.tensor([[0, 3], [1, 0]])
    same(functional.one_hot(classes.to(dtype).npu(), 5), functional.one_hot(classes, 5))
    same(functional.one_hot(classes.to(dtype).npu()), functional.one_hot(classes))


def test_an_embedding_is_read_in_every_layout_of_indices():
    weight = numbers(7, 4, seed=1, dtype=torch.float32)
    index = indices(3, 5, below=7, seed=2)
    device = index.npu()
    same(functional.embedding(device.T, weight.float().npu()), functional.embedding(index.T, weight))
    same(functional.embedding(device[:, ::2], weight.float().npu()), functional.embedding(index[:, ::2], weight))
    same(functional.embedding(device[:0], weight.float().npu()), functional.embedding(index[:0], weight))


@pytest.mark.parametrize("reduce", ["prod", "mean"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_a_product_or_mean_by_index_rounds_once(reduce, dtype):
    value, source = numbers(4, 5, seed=1, dtype=dtype), numbers(4, 2, seed=2, dtype=dtype)
    found = on_npu(value, dtype).scatter_reduce(1, GRID.npu(), on_npu(source, dtype), reduce)
    expected = value.scatter_reduce(1, GRID, source, reduce)
    agree_rounded_once(found, expected, 8 * value.abs().scatter_reduce(1, GRID, source.abs(), reduce))


def test_rows_of_an_embedding_are_held_to_a_norm():
    weight, index = 3 * numbers(4, 5, seed=1, dtype=torch.float32), torch.tensor([2, 0, 2])
    device = weight.float().npu()
    found, expected = functional.embedding(index.npu(), device, max_norm=1.0), weight.clone()
    functional.embedding(index, expected, max_norm=1.0)
    agree_rounded_once(device, expected, 20 * expected)
    agree_rounded_once(found, expected[index], 20 * expected[index])
