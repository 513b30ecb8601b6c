"""Products of activations and a weight: the protocol of a kind of product, and its call by torch's functions.

A layer has the layout of its weight (``WeightLayout``, ``ExpertWeights``), and multiplies by torch's kernels or by the
``Product`` that ``use_product`` gave it. Collectives, recomputation and queues do not depend on the kind: they multiply
whole tensors, or pieces of their rows, by a matrix, which may be a ``Multiplier``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ds_npu.parallel.tensor.weight_product import WeightProduct

PlainGradient = Callable[[Tensor, Tensor], WeightProduct]
"""A function from x and dy to the product of the weight's gradient, in the weight's layout."""


class Product(Protocol):
    """A kind of product, row by row: a tensor may hold only some of the rows, and other ranks the others."""

    def forward(self, x: Tensor, weight: Tensor, counts: Tensor | None = None) -> Tensor:
        """x [..., K] times weight [K, N]; with ``counts`` [E], rows [P, K] times their expert's matrix of [E, K, N]."""

    def input_gradient(self, dy: Tensor, weight: Tensor, counts: Tensor | None = None) -> Tensor:
        """The gradient of x, from dy [..., N] and the transposed weight, [N, K] or [E, N, K]."""

    def weight_gradient(self, x: Tensor, dy: Tensor, plain: PlainGradient) -> WeightProduct:
        """The product for the weight's sink, which may compute it later."""


class Multiplier(Tensor):
    """A matrix [K, N] with a product of its own, which torch's functions of products call."""

    matrix: Tensor
    product: Callable[[Tensor, Tensor], Tensor]

    @staticmethod
    def of(matrix: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Multiplier:
        """``matrix`` whose product with rows is ``product(rows, matrix)``."""
        made = matrix.as_subclass(Multiplier)
        made.matrix, made.product = matrix, product
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.t:
            return args[0]  # functional.linear gets the matrix transposed.
        if func in (torch.mm, torch.matmul, functional.linear):
            x, by, added = (*args, None)[:3]
        elif func in (torch.addmm, Tensor.addmm_):
            added, x, by = args
        else:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        y = by.product(x, by.matrix)
        y = y if added is None else y + added
        out = added if func is Tensor.addmm_ else (kwargs or {}).get("out")
        return y if out is None else out.copy_(y)
