"""A call of an operator, and the numbers in its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, ParamSpec

import torch

Arguments = tuple[object, ...]
Maker = Callable[[torch.dtype], Arguments]
"""Makes the arguments of a call, in a dtype, on the CPU."""
Sizes = ParamSpec("Sizes")


def maker(make: Callable[Concatenate[torch.dtype, Sizes], Arguments]) -> Callable[Sizes, Maker]:
    """Turn ``make(dtype, *sizes)`` into a function of the sizes, which returns a Maker that takes the dtype."""

    @functools.wraps(make)
    def with_sizes(*args: Sizes.args, **kwargs: Sizes.kwargs) -> Maker:
        return lambda dtype: make(dtype, *args, **kwargs)

    return with_sizes


@dataclass(frozen=True)
class Call:
    """``function(*args(dtype))``: it runs the kernel on NPU tensors, the reference on CPU tensors."""

    name: str
    function: Callable[..., object]
    args: Maker


def drawn(*shape: int, seed: int, dtype: torch.dtype, gradient: bool = True) -> torch.Tensor:
    """Normal numbers that bf16 and fp16 hold exactly, so that they are the same in every dtype."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().half()
    return values.to(dtype).requires_grad_(gradient)
