"""A call of an operator, and the numbers in its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Maker = Callable[[torch.dtype], tuple[object, ...]]
"""Makes the arguments of a call, in a dtype, on the CPU."""


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
