"""Activation functions and their gradients on NPUs are those of float64 on the CPU, rounded."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch_npu
from agreement import FLOATING, agree, layouts, on_npu, within
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

Function = Callable[[torch.Tensor], torch.Tensor]


def gelu_with_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


@dataclass(frozen=True)
class Activation:
    """What is called on the NPU, what it is in float64, and the half units it may be off by.

    ``from_result``: the gradient is computed from the result as it was rounded, not from the input.
    """

    name: str
    function: Function
    reference: Function | None = None
    roundings: float = 4
    from_result: bool = False

    def __str__(self) -> str:
        return self.name


ACTIVATIONS = (
    Activation("relu", functional.relu, roundings=0),
    Activation("relu in place", lambda x: functional.relu_(x * 1), functional.relu, roundings=0),
    # CANN's Gelu has the formula with tanh alone, and torch_npu calls it for both unless told otherwise.
    Activation("gelu", functional.gelu, gelu_with_tanh, roundings=6),
    Activation("gelu with tanh", gelu_with_tanh, roundings=6),
    Activation(
        "npu_gelu", lambda x: torch_npu.npu_gelu(x) if x.device.type == "npu" else functional.gelu(x), roundings=6
    ),
    Activation("npu_gelu with tanh", lambda x: torch_npu.npu_gelu(x, approximate="tanh"), gelu_with_tanh, roundings=6),
    Activation("fast_gelu", lambda x: torch_npu.fast_gelu(x), lambda x: x * torch.sigmoid(1.702 * x)),
    Activation("silu", functional.silu),
    Activation("silu in place", lambda x: functional.silu(x * 1, inplace=True), functional.silu),
    Activation("mish", functional.mish, roundings=6),
    Activation("hardswish", functional.hardswish),
    Activation("hardsigmoid", functional.hardsigmoid),
    Activation("sigmoid", torch.sigmoid, from_result=True),
    Activation("tanh", torch.tanh, from_result=True),
    Activation("logsigmoid", functional.logsigmoid),
    Activation("softplus", functional.softplus),
    Activation("steep softplus", lambda x: functional.softplus(x, beta=2, threshold=3)),
    Activation("leaky_relu", functional.leaky_relu),
    Activation(
        "leaky_relu in place", lambda x: functional.leaky_relu_(x * 1, 0.25), lambda x: functional.leaky_relu(x, 0.25)
    ),
    Activation("elu", functional.elu),
    Activation(
        "elu in place", lambda x: functional.elu_(x * 1, 0.5), lambda x: functional.elu(x, 0.5), from_result=True
    ),
    Activation("selu", functional.selu),
    Activation("relu6", functional.relu6),
    Activation("hardtanh", lambda x: functional.hardtanh(x, -0.5, 2)),
    Activation("threshold", lambda x: functional.threshold(x, 0.5, -1)),
    Activation(
        "hardtanh in place", lambda x: functional.hardtanh_(x * 1, -0.5, 2), lambda x: functional.hardtanh(x, -0.5, 2)
    ),
    Activation(
        "threshold in place",
        lambda x: functional.threshold_(x * 1, 0.5, -1),
        lambda x: functional.threshold(x, 0.5, -1),
    ),
    Activation("hardswish in place", lambda x: functional.hardswish(x * 1, inplace=True), functional.hardswish),
    Activation("hardsigmoid in place", lambda x: functional.hardsigmoid(x * 1, inplace=True), functional.hardsigmoid),
    Activation("mish in place", lambda x: functional.mish(x * 1, inplace=True), functional.mish, roundings=6),
    Activation("softsign", functional.softsign),
)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@settings(max_examples=25)
@given(st.data())
def test_an_activation_and_its_gradient_are_those_of_float64_rounded(activation, data):
    dtype, shape = data.draw(st.sampled_from(FLOATING)), data.draw(st.lists(st.integers(0, 6), max_size=3))
    value = within(-4, 4, *shape, seed=data.draw(st.integers(0, 9)), dtype=dtype).requires_grad_()
    weights = within(-1, 1, *shape, seed=77, dtype=dtype)
    placed = on_npu(value.detach(), dtype, data.draw(layouts(len(shape)))).requires_grad_()
    expected = (activation.reference or activation.function)(value)
    found = activation.function(placed)
    # What is computed is x times, or 1 minus, a function between 0 and 1: its error is one of x, or of 1.
    bound = value.detach().abs() + (expected.detach().abs() > 0)
    sharp = activation.roundings == 0
    agree(found.detach(), expected.detach(), None if sharp else bound, activation.roundings)
    expected.backward(weights)
    found.backward(on_npu(weights, dtype, data.draw(layouts(len(shape)))))
    steepest = weights.abs() * 2.2  # no slope is larger; that of the steep softplus is 2 at most
    agree(placed.grad, value.grad, steepest, activation.roundings + 2 * activation.from_result)


@pytest.mark.parametrize("dim", [0, 1, -1])
@settings(max_examples=15)
@given(dtype=st.sampled_from(FLOATING), layout=layouts(2))
def test_a_gated_linear_unit_and_its_gradient(dim, dtype, layout):
    value = within(-4, 4, 6, 8, seed=1, dtype=dtype).requires_grad_()
    placed = on_npu(value.detach(), dtype, layout).requires_grad_()
    expected, found = functional.glu(value, dim), functional.glu(placed, dim)
    agree(found.detach(), expected.detach(), roundings=4)
    weights = within(-1, 1, *expected.shape, seed=2, dtype=dtype)
    expected.backward(weights)
    found.backward(on_npu(weights, dtype))
    agree(placed.grad, value.grad, torch.full((6, 8), 4.0, dtype=torch.float64), roundings=4)


# Softsign does not: it is a quotient, composed by torch, which loses the digits of a large x in 16 bits.
@pytest.mark.parametrize("activation", [each for each in ACTIVATIONS if each.name != "softsign"], ids=str)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_large_numbers_saturate(activation, dtype):
    value = torch.tensor([-100.0, -30.0, 30.0, 100.0], dtype=torch.float64, requires_grad=True)
    placed = on_npu(value.detach(), dtype).requires_grad_()
    expected, found = (activation.reference or activation.function)(value), activation.function(placed)
    # A value below the smallest number next to x (or 1) is allowed to vanish.
    agree(found.detach(), expected.detach(), value.detach().abs() + 1)
    expected.sum().backward()
    found.backward(torch.ones_like(found))
    agree(placed.grad, value.grad, 2 + value.detach().abs())


def test_the_gradient_of_what_is_cut_off_is_zero():
    value = torch.tensor([-1.0, 0.0, 2.0], device="npu", requires_grad=True)
    functional.relu(value).backward(torch.full((3,), 3.0, device="npu"))
    assert value.grad.tolist() == [0, 0, 3]
