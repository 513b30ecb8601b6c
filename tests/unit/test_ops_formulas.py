"""The references of the operators: float64 against formulas written otherwise, gradients by differences, low precision
against what PyTorch itself loses."""

from __future__ import annotations

import pytest
import torch
from operator_cases import CASES, WITHOUT_KERNEL, Case, drawn, error, outcome

from ds_npu.ops.all import OPERATORS
from ds_npu.ops.layers import softmax
from ds_npu.ops.matmul_accumulate import matmul_accumulate_

SOME = [case for case in (*CASES, *WITHOUT_KERNEL) if case.name != "no token"]
every = pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)


@every
def test_float64_is_exact_forward_and_backward(case: Case):
    for found, true in zip(
        outcome(case.operator, case.args(torch.float64)),
        outcome(case.formula, case.args(torch.float64)),
        strict=True,
    ):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-12)


@every
def test_gradients_are_those_of_small_differences(case: Case):
    # fast_mode: along random directions, which is enough to find a wrong term and takes one evaluation for each.
    assert torch.autograd.gradcheck(case.operator, case.args(torch.float64), fast_mode=True)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_loses_no_more_than_twice_what_pytorch_does(case: Case, dtype):
    exact = outcome(case.formula, case.args(torch.float64))
    plain = outcome(case.plain, case.args(dtype))
    for found, own, true in zip(outcome(case.operator, case.args(dtype)), plain, exact, strict=True):
        assert found.dtype == own.dtype
        assert error(found, true) <= 2 * error(own, true)


def test_no_token_has_no_loss():
    (case,) = [case for case in WITHOUT_KERNEL if case.name == "no token"]
    losses, gradient = outcome(case.operator, case.args(torch.float32))
    assert (losses.shape, gradient.shape) == ((0,), (0, 100))


def test_a_row_that_is_wholly_masked_is_even_and_has_no_gradient():
    x = drawn(2, 4, seed=1, dtype=torch.float64)
    y = softmax(x, torch.tensor([[False] * 4, [True] * 4]))
    y.backward(drawn(2, 4, seed=2, dtype=torch.float64, gradient=False))
    assert torch.equal(y[1], torch.full((4,), 0.25, dtype=torch.float64))
    assert torch.equal(x.grad[1], torch.zeros(4, dtype=torch.float64)) and bool(x.grad[0].any())


@pytest.mark.parametrize(
    ("buffer_dtype", "dtype"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_a_weight_gradient_is_added_in_the_buffers_precision(buffer_dtype, dtype):
    shapes = ((5, 7), (33, 5), (33, 7))
    buffer, dy, x = (drawn(*shape, seed=i, dtype=torch.float64, gradient=False) for i, shape in enumerate(shapes))
    expected = buffer + torch.einsum("to,ti->oi", dy, x)
    own = buffer.to(buffer_dtype) + dy.to(buffer_dtype).t() @ x.to(buffer_dtype)
    mine = buffer.to(buffer_dtype, copy=True)
    assert matmul_accumulate_(mine, dy.to(dtype), x.to(dtype)) is mine
    assert error(mine, expected) <= max(1e-12, 2 * error(own, expected))
    assert error(own.bfloat16(), expected) > 100 * error(mine, expected)


def test_the_operators_have_names_of_their_own_and_a_docstring_each():
    assert len({operator.name for operator in OPERATORS}) == len(OPERATORS) == 15
    assert all(operator.reference.__doc__ for operator in OPERATORS)
