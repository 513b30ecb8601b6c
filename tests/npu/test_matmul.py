"""Products of matrices and vectors."""

import pytest
import torch
from accumulation import agree_rounded_once, check_multilinear
from agreement import FLOATING, layouts, numbers, on_npu
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional

PRODUCTS = {
    "mm": (torch.mm, "mk kn"),
    "bmm": (torch.bmm, "bmk bkn"),
    "mv": (torch.mv, "mk k"),
    "dot": (torch.dot, "k k"),
    "vector by matrix": (torch.matmul, "k kn"),
    "vector by batch": (torch.matmul, "k bkn"),
    "batch by vector": (torch.matmul, "bmk k"),
    "batch by matrix": (torch.matmul, "bcmk kn"),
    "matrix by batch": (torch.matmul, "mk bkn"),
    "batches": (torch.matmul, "bcmk bckn"),
    "linear": (functional.linear, "bmk nk"),
    "linear with bias": (functional.linear, "mk nk n"),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), "mn mk kn"),
    "addmm of a row": (torch.addmm, "n mk kn"),
    "addmv": (lambda c, a, b: torch.addmv(c, a, b, beta=0.5, alpha=2), "m mk k"),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2), "bmn bmk bkn"),
    "addbmm": (lambda c, a, b: torch.addbmm(c, a, b, beta=0.5, alpha=2), "mn bmk bkn"),
    "addr": (lambda c, a, b: torch.addr(c, a, b, beta=0.5, alpha=2), "mn m n"),
}


# Their gradients are made of a product that is rounded and a sum; that of einsum if a dim is 1, for which it multiplies
# element by element.
ROUNDED_GRADIENT = {
    "broadcast batches": (torch.matmul, "b1mk ckn"),
    "outer": (torch.outer, "m n"),
    "einsum": (lambda a, b: torch.einsum("bmk,bnk->bmn", a, b), "bmk bnk"),
}


def operands(shapes: str, sizes: dict[str, int], dtype: torch.dtype) -> list[torch.Tensor]:
    return [
        numbers(*(sizes.get(dim, 1) for dim in shape), seed=seed, dtype=dtype)
        for seed, shape in enumerate(shapes.split())
    ]


@pytest.mark.parametrize("name", PRODUCTS)
@settings(max_examples=30)
@given(st.data(), st.sampled_from(FLOATING), st.lists(st.integers(1, 7), min_size=4, max_size=4))
def test_a_product_and_its_gradients_sum_in_float32_and_round_once(name, data, dtype, sizes):
    function, shapes = PRODUCTS[name]
    m, k, n, b = sizes
    values = operands(shapes, {"m": m, "k": k, "n": n, "b": b, "c": 2}, dtype)
    places = [data.draw(layouts(value.dim())) for value in values]
    check_multilinear(function, values, dtype, places, terms=2 * m * k + n * b + 2)


@pytest.mark.parametrize("name", ROUNDED_GRADIENT)
@settings(max_examples=20)
@given(st.data(), st.sampled_from(FLOATING), st.lists(st.integers(1, 7), min_size=4, max_size=4))
def test_a_product_of_broadcast_operands_rounds_once(name, data, dtype, sizes):
    function, shapes = ROUNDED_GRADIENT[name]
    m, k, n, b = sizes
    values = operands(shapes, {"m": m, "k": k, "n": n, "b": b, "c": 2}, dtype)
    found = function(*[on_npu(value, dtype, data.draw(layouts(value.dim()))) for value in values])
    agree_rounded_once(found, function(*values), (k + 3) * function(*[value.abs() for value in values]))


@pytest.mark.parametrize("name", ROUNDED_GRADIENT)
def test_gradients_of_broadcast_operands_are_right_in_float32(name):
    function, shapes = ROUNDED_GRADIENT[name]
    values = operands(shapes, {"m": 3, "k": 4, "n": 5, "b": 2, "c": 2}, torch.float32)
    check_multilinear(function, values, torch.float32, [None] * 2, terms=30)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_long_sum_of_products_rounds_once(dtype, transposed):
    a, b = numbers(64, 700, seed=1, dtype=dtype), numbers(700, 33, seed=2, dtype=dtype)
    right = on_npu(b.T.contiguous(), dtype).T if transposed else on_npu(b, dtype)
    # A float32 sum of 700 terms in blocks loses less than 40 roundings of the sum of the magnitudes.
    agree_rounded_once(on_npu(a, dtype) @ right, a @ b, 40 * (a.abs() @ b.abs()))


@pytest.mark.parametrize("name", ["mm", "bmm", "batch by matrix", "linear with bias", "addmm", "baddbmm"])
@pytest.mark.parametrize("empty", ["m", "k", "b"])
def test_empty_operands_give_empty_results_or_zeros(name, empty):
    function, shapes = PRODUCTS[name]
    values = operands(shapes, {"m": 3, "k": 4, "n": 2, "b": 2, "c": 2} | {empty: 0}, torch.float32)
    found = function(*[on_npu(value, torch.float32) for value in values])
    expected = function(*values)
    agree_rounded_once(found, expected, 10 * function(*[value.abs() for value in values]))


@given(st.sampled_from(FLOATING), st.data())
@example(torch.bfloat16, None)
def test_a_product_can_be_written_into_a_strided_result(dtype, data):
    a, b = numbers(5, 6, seed=1, dtype=dtype), numbers(6, 4, seed=2, dtype=dtype)
    out = on_npu(torch.zeros(5, 4), dtype, data.draw(layouts(2)) if data else None)
    torch.mm(on_npu(a, dtype), on_npu(b, dtype), out=out)
    agree_rounded_once(out, a @ b, 9 * (a.abs() @ b.abs()))


@pytest.mark.parametrize("dtype", FLOATING)
def test_addmm_in_place_keeps_its_own_terms(dtype):
    c, a, b = operands("mn mk kn", {"m": 5, "k": 6, "n": 4}, dtype)
    found = on_npu(c, dtype).addmm_(on_npu(a, dtype), on_npu(b, dtype), beta=0.5, alpha=2)
    agree_rounded_once(found, 0.5 * c + 2 * a @ b, 20 * (c.abs() + a.abs() @ b.abs()))


def test_a_bf16_product_can_be_given_in_float32():
    a, b = numbers(5, 6, seed=1, dtype=torch.bfloat16), numbers(6, 4, seed=2, dtype=torch.bfloat16)
    found = torch.mm(on_npu(a, torch.bfloat16), on_npu(b, torch.bfloat16), out_dtype=torch.float32)
    assert found.dtype == torch.float32
    agree_rounded_once(found, a @ b, 9 * (a.abs() @ b.abs()))


def test_beta_of_zero_ignores_what_is_not_a_number():
    a, b = operands("mk kn", {"m": 3, "k": 4, "n": 2}, torch.float32)
    nan = torch.full((3, 2), torch.nan).npu()
    agree_rounded_once(torch.addmm(nan, a.float().npu(), b.float().npu(), beta=0), a @ b, 9 * (a.abs() @ b.abs()))


@pytest.mark.parametrize("dtype", FLOATING)
def test_addr_in_place_keeps_its_own_terms(dtype):
    c, a, b = operands("mn m n", {"m": 5, "n": 4}, dtype)
    found = on_npu(c, dtype).addr_(on_npu(a, dtype), on_npu(b, dtype), beta=0.5, alpha=2)
    expected = 0.5 * c + 2 * torch.outer(a, b)
    agree_rounded_once(found, expected, 8 * (c.abs() + torch.outer(a, b).abs()))
