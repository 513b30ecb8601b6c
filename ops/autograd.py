"""Types for ``torch.autograd.Function``, whose context and ``apply`` torch leaves untyped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")


class Context(Protocol):
    """The ``ctx`` of a Function. A Function that keeps more between forward and backward declares it in a subclass."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def applied(function: type[torch.autograd.Function], forward: Callable[Concatenate[C, P], R]) -> Callable[P, R]:
    """``function.apply``, with the parameters and the result of ``forward``, which is the forward of ``function``."""
    apply: Callable[P, R] = function.apply
    return apply
