"""Products of activations and a weight: a protocol for kinds of product, and the products of a weight's gradient.

A layer has the layout of its weight (``WeightLayout``, ``ExpertWeights``), and multiplies by torch's kernels or by the
``Product`` that ``use_product`` gave it. Collectives, recomputation and queues do not depend on the kind: they multiply
whole tensors, or pieces of their rows, by a matrix, which may be a ``Multiplier``.

The sum of products, one for each use of a weight in a forward, is the weight's gradient. A product keeps its operands,
so that it can be computed after its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ds_npu.ops.matmul_accumulate import matmul_accumulate_

WIDE = (torch.float32, torch.float64)


class WeightProduct(Protocol):
    """One product of a weight's gradient."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the operands."""

    def gradient(self) -> torch.Tensor:
        """Compute the product, in the weight's shape: a new, contiguous tensor in the dtype of the operands."""

    def add_to(self, buffer: torch.Tensor) -> bool:
        """Add the product to ``buffer`` [the weight's shape] in its precision, without another tensor of that size.

        Return False, and add nothing, where this product or the buffer's dtype has no such kernel.
        """


@dataclass(frozen=True)
class MatrixProduct:
    """The product dyᵀ x [rows, columns] of a linear layer, from dy [T, rows] and x [T, columns]."""

    dy: torch.Tensor
    x: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.dy.dtype

    def gradient(self) -> torch.Tensor:
        return self.dy.t() @ self.x

    def add_to(self, buffer: torch.Tensor) -> bool:
        if buffer.dtype in WIDE:
            matmul_accumulate_(buffer, self.dy, self.x)
        elif buffer.dtype == self.dtype:
            buffer.addmm_(self.dy.t(), self.x)
        else:
            return False
        return True


@dataclass(frozen=True)
class LookupProduct:
    """The gradient [rows, H] of an embedding: the rows of dy [..., H] summed by word number [...]."""

    dy: torch.Tensor
    words: torch.Tensor
    rows: int
    padding_idx: int
    """A row that gets no gradient; -1 for none."""

    @property
    def dtype(self) -> torch.dtype:
        return self.dy.dtype

    def gradient(self) -> torch.Tensor:
        backward = torch.ops.aten.embedding_dense_backward
        gradient: torch.Tensor = backward(self.dy, self.words, self.rows, self.padding_idx, False)
        return gradient

    def add_to(self, buffer: torch.Tensor) -> bool:
        return False


@dataclass(frozen=True)
class ScaledSum:
    """``scale`` (a scalar) times a sum [the weight's shape] that forward has computed (a chunked loss)."""

    sum: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype
    """The dtype of the weight."""

    def gradient(self) -> torch.Tensor:
        return torch.mul(self.sum, self.scale).to(self.dtype)

    def add_to(self, buffer: torch.Tensor) -> bool:
        if buffer.dtype != self.sum.dtype:
            return False
        buffer.addcmul_(self.sum, self.scale)
        return True


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
