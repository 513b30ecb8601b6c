"""Plain linear layers, on one tensor rank, whose weight's gradient is added to a buffer by the matrix product."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ds_npu.parallel.tensor.linear import ColumnLinear, Form, RowLinear, linear


class DirectLinear:
    """What is put before a plain linear layer's class: its product, by ``ds_npu.parallel.tensor.linear.linear``."""

    form = Form()
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] to [..., N]."""
        return linear(x, self.weight, self.bias, self.form)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and files have a layer of the class that it was."""
        return copyreg._reconstructor, (type(self).__bases__[1], object, None), dict(vars(self))  # type: ignore[attr-defined]


def is_plain(module: nn.Module) -> bool:
    """Whether ``module`` is exactly an nn.Linear or a Conv1D of transformers, with the forward of its class."""
    kind = type(module)
    known = kind is nn.Linear or (kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils")
    return known and "forward" not in vars(module)


def use_direct_gradient(module: nn.Module) -> None:
    """Let the plain linear layer ``module`` look for a gradient buffer; it stays the same object."""
    # A class, and not a forward of its own: a copy of the module multiplies with its own weight.
    kind: Any = type(module)
    object.__setattr__(module, "__class__", _direct(kind))


def direct_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights whose layers look for a gradient buffer, by name; one that is tied comes once."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, DirectLinear | ColumnLinear | RowLinear) and id(module.weight) not in seen:
            seen.add(id(module.weight))
            yield f"{name}.weight".lstrip("."), module.weight


@functools.cache
def _direct(kind: Any) -> Any:
    return type(f"Direct{kind.__name__}", (DirectLinear, kind), {"form": Form(transposed=kind is not nn.Linear)})
