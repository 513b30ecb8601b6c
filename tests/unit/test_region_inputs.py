"""Which arguments of a module enter its tensor-parallel region with its hidden states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_npu.parallel.tensor.axis import TensorAxis
from ds_npu.parallel.tensor.region import RegionInput, make_region


class PostBackwardFunctionModule(torch.autograd.Function):
    """DeepSpeed's function of this name: each tensor that a module is given under ZeRO 3 becomes another one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> torch.Tensor:
        return dx


class OtherFunction(PostBackwardFunctionModule):
    """A function of a user's, such as one that changes the gradient."""


class Attention(nn.Module):
    def forward(self, v: Any, k: Any, q: Any, residual: Any) -> list[bool]:
        return [isinstance(each, RegionInput) for each in (v, k, q, residual)]


@pytest.fixture
def attention():
    module = Attention()
    # A region of one rank, which sends nothing.
    make_region(module, TensorAxis.__new__(TensorAxis), None)
    return module


def hooked(x: torch.Tensor, times: int) -> list[torch.Tensor]:
    return [PostBackwardFunctionModule.apply(x) for _ in range(times)]


@pytest.mark.parametrize("gradients", [True, False])
def test_hidden_states_that_are_given_three_times_enter_with_each(attention, gradients):
    x = torch.randn(2, 3, 4, requires_grad=gradients)
    assert attention(x, x, x, x) == [True, True, True, False]
    assert attention(*hooked(x, 4)) == [True, True, True, False]
    with torch.no_grad():
        assert attention(*hooked(x, 4)) == [True, True, True, False]


def test_other_tensors_do_not_enter(attention):
    x = torch.randn(2, 3, 4, requires_grad=True)
    # Of the same memory, with other gradients.
    assert attention(x, x.detach(), OtherFunction.apply(x), x) == [True, False, False, False]
    first, y = hooked(x, 1), torch.randn(2, 3, 4, requires_grad=True)
    assert attention(*first, *hooked(y, 1), OtherFunction.apply(x), x) == [True, False, False, False]
    assert attention(*first, x.detach(), x.clone(), x) == [True, False, False, False]
    plain = x.detach()
    assert attention(plain, plain.clone(), plain[:, :2], plain) == [True, False, False, False]


def test_the_name_of_the_node_is_deepspeeds():
    from deepspeed.runtime.zero import parameter_offload

    assert PostBackwardFunctionModule.__name__ in parameter_offload.__loader__.get_source(parameter_offload.__name__)
