"""Linear layers of one tensor rank whose matrix product adds the weight's gradient to its buffer."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ds_npu.parallel.forward_wraps import has_own_forward
from ds_npu.parallel.tensor.linear import ColumnLinear, RowLinear, linear
from ds_npu.parallel.tensor.weight_layout import WeightLayout


class DirectLinear:
    """First base of the class of a plain linear layer: it multiplies by ``ds_npu.parallel.tensor.linear.linear``."""

    layout = WeightLayout()
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] to [..., N]."""
        return linear(x, self.weight, self.bias, self.layout)

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and files hold a layer of the plain class."""
        return copyreg._reconstructor, (type(self).__bases__[1], object, None), dict(vars(self))  # type: ignore[attr-defined]


def is_plain(module: nn.Module) -> bool:
    """Whether ``module`` is exactly an nn.Linear or a Conv1D of transformers, with the forward of its class."""
    kind = type(module)
    known = kind is nn.Linear or (kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils")
    return known and not has_own_forward(module)


def use_direct_gradient(module: nn.Module) -> None:
    """Make the plain linear layer ``module``, which stays the same object, use its weight's gradient buffer."""
    # A class, and not a forward of its own: a copy of the module multiplies with its own weight.
    kind: Any = type(module)
    object.__setattr__(module, "__class__", _direct(kind))


def direct_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights whose layers use a gradient buffer, by name; a tied one comes once."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, DirectLinear | ColumnLinear | RowLinear) and id(module.weight) not in seen:
            seen.add(id(module.weight))
            yield f"{name}.weight".lstrip("."), module.weight


@functools.cache
def _direct(kind: Any) -> type[nn.Module]:
    return type(
        f"Direct{kind.__name__}", (DirectLinear, kind), {"layout": WeightLayout(transposed=kind is not nn.Linear)}
    )
