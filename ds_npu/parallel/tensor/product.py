"""Products of activations and a weight: a protocol for kinds of product, and the products of a weight's gradient.

A layer has the layout of its weight (``WeightLayout``, ``ExpertWeights``), and multiplies by torch's kernels or by the
``Product`` that ``use_product`` gave it. Collectives, recomputation and queues do not depend on the kind: they multiply
whole tensors, or pieces of their rows, by a matrix, which may be a ``Multiplier``.

The sum of products, one for each use of a weight in a forward, is the weight's gradient. A product keeps its operands,
so that it can be computed after its backward. A ``WeightLayout`` is the memory layout of the weight of a linear layer,
with its products. Shape letters: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ds_npu.ops.matmul_accumulate import matmul_accumulate_
from ds_npu.parallel.runtime.calls import Arguments, Keywords, Operation
from ds_npu.parallel.tensor.sharding import Ranges

WIDE = (torch.float32, torch.float64)


class WeightProduct(Protocol):
    """One product of a weight's gradient, for one use of the weight."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the operands."""

    def gradient(self) -> Tensor:
        """Compute the product, in the weight's shape: a new, contiguous tensor in the dtype of the operands."""

    def add_to(self, buffer: Tensor) -> bool:
        """Add the product to ``buffer`` [the weight's shape] in its precision, without another tensor of that size.

        Return False, and add nothing, where this product or the buffer's dtype has no such kernel.
        """
        return False

    def write_to(self, memory: Tensor) -> bool:
        """Write ``gradient()`` to ``memory`` [the weight's shape, the operands' dtype], without another such tensor.

        Return False, and write nothing, where this product has no such kernel.
        """
        return False


@dataclass(frozen=True)
class MatrixProduct:
    """The product dyᵀ x [rows, columns] of a linear layer, from dy [T, rows] and x [T, columns]."""

    dy: Tensor
    x: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.dy.dtype

    def gradient(self) -> Tensor:
        return self.dy.t() @ self.x

    def add_to(self, buffer: Tensor) -> bool:
        if buffer.dtype in WIDE:
            matmul_accumulate_(buffer, self.dy, self.x)
        elif buffer.dtype == self.dtype:
            buffer.addmm_(self.dy.t(), self.x)
        else:
            return False
        return True

    def write_to(self, memory: Tensor) -> bool:
        torch.mm(self.dy.t(), self.x, out=memory)
        return True


@dataclass(frozen=True)
class LookupProduct(WeightProduct):
    """The gradient [rows, H] of an embedding: the rows of dy [..., H] summed by word number [...]."""

    dy: Tensor
    words: Tensor
    rows: int
    padding_idx: int
    """A row that gets no gradient; -1 for none."""

    @property
    def dtype(self) -> torch.dtype:
        return self.dy.dtype

    def gradient(self) -> Tensor:
        backward = torch.ops.aten.embedding_dense_backward
        gradient: Tensor = backward(self.dy, self.words, self.rows, self.padding_idx, False)
        return gradient


@dataclass(frozen=True)
class ScaledSum:
    """``scale`` (a scalar) times a sum [the weight's shape] that forward has computed (a chunked loss)."""

    sum: Tensor
    scale: Tensor
    dtype: torch.dtype
    """The dtype of the weight."""

    def gradient(self) -> Tensor:
        return torch.mul(self.sum, self.scale).to(self.dtype)

    def add_to(self, buffer: Tensor) -> bool:
        if buffer.dtype != self.sum.dtype:
            return False
        buffer.addcmul_(self.sum, self.scale)
        return True

    def write_to(self, memory: Tensor) -> bool:
        torch.mul(self.sum, self.scale, out=memory)
        return True


PlainGradient = Callable[[Tensor, Tensor], WeightProduct]
"""A function from x and dy to the product of the weight's gradient, in the weight's layout."""


class Product(Protocol):
    """A kind of product that computes each row by itself.

    A call may get some of the rows, and calls on other ranks the rest.
    """

    def forward(self, x: Tensor, weight: Tensor, counts: Tensor | None = None) -> Tensor:
        """x [..., K] times weight [K, N]; with ``counts`` [E], rows [P, K] times their expert's matrix of [E, K, N]."""

    def input_gradient(self, dy: Tensor, weight: Tensor, counts: Tensor | None = None) -> Tensor:
        """The gradient of x, from dy [..., N] and the transposed weight, [N, K] or [E, N, K]."""

    def weight_gradient(self, x: Tensor, dy: Tensor, plain: PlainGradient) -> WeightProduct:
        """The product for the weight's sink, which may compute it later."""


class Multiplier(Tensor):
    """A matrix [K, N] for which torch.mm, matmul, addmm and functional.linear call its own ``product``."""

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
        cls, func: Operation, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
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


@dataclass(frozen=True)
class WeightLayout:
    """The memory layout of a weight, the outputs that are computed from it, and their kind of product."""

    transposed: bool = False
    """Whether the weight is [K, N] (GPT-2's Conv1D) in place of [N, K]."""
    outputs: Ranges | None = None
    """The outputs that this rank computes of a weight that is whole on every rank, one perhaps twice; None: all."""
    product: Product | None = None
    """The kind of product; None: torch's kernels."""
    shards: tuple[int, int] = (0, 0)
    """The least and the most outputs (of a row linear: inputs) that a tensor rank computes with; 0: not known."""

    @property
    def most(self) -> int:
        """The most outputs, or inputs, that a tensor rank computes with; 0: not known."""
        return self.shards[1]

    def forward(self, weight: Tensor) -> Tensor:
        """The matrix [K, N] by which activations are multiplied."""
        matrix = self.matrix(weight)
        return matrix if self.product is None else Multiplier.of(matrix, self.product.forward)

    def input_gradient(self, weight: Tensor) -> Tensor:
        """The matrix [N, K] by which gradients of outputs are multiplied."""
        matrix = self.matrix(weight).t()
        return matrix if self.product is None else Multiplier.of(matrix, self.product.input_gradient)

    def weight_gradient(self, weight: Tensor, x: Tensor, dy: Tensor) -> WeightProduct:
        """The product of the gradient of ``weight`` from ``x`` [..., K] and ``dy`` [..., N], for its sink."""
        if self.product is not None:
            return self.product.weight_gradient(x, dy, partial(replace(self, product=None).weight_gradient, weight))
        x = x.reshape(-1, x.shape[-1])
        dy = dy.reshape(-1, dy.shape[-1])
        if self.outputs is not None:
            return _PickedProduct(self, dy, x, weight.shape)
        return MatrixProduct(x, dy) if self.transposed else MatrixProduct(dy, x)

    def matrix(self, weight: Tensor) -> Tensor:
        """The part of ``weight`` that is used, [K, N]; a view where it is all of it."""
        matrix = weight if self.transposed else weight.t()
        return matrix if self.outputs is None else torch.cat(self._pieces(matrix), dim=-1)

    def used(self, bias: Tensor | None) -> Tensor | None:
        """The part of ``bias`` that is used, [N]."""
        return bias if bias is None or self.outputs is None else torch.cat(self._pieces(bias), dim=-1)

    def bias_gradient(self, bias: Tensor, dy: Tensor) -> Tensor:
        """The gradient of ``bias`` from ``dy`` [..., N]."""
        gradient = dy.reshape(-1, dy.shape[-1]).sum(dim=0)
        if self.outputs is None:
            return gradient
        whole = torch.zeros_like(bias)
        self.add_used(whole, gradient)
        return whole

    def add_used(self, whole: Tensor, used: Tensor) -> None:
        """Add ``used`` [..., N], of the outputs that are computed, to ``whole`` [..., outputs of the whole weight]."""
        pieces = self._pieces(whole)
        lengths = [each.shape[-1] for each in pieces]
        for piece, part in zip(pieces, torch.split(used, lengths, dim=-1), strict=True):
            piece += part

    def _pieces(self, whole: Tensor) -> list[Tensor]:
        return [whole.narrow(-1, start, stop - start) for start, stop in self.outputs or ()]


@dataclass(frozen=True)
class _PickedProduct(WeightProduct):
    """The product for the ``outputs`` of a layout from dy [T, N] and x [T, K]; the weight's other outputs get 0."""

    layout: WeightLayout
    dy: Tensor
    x: Tensor
    shape: torch.Size

    @property
    def dtype(self) -> torch.dtype:
        return self.dy.dtype

    def gradient(self) -> Tensor:
        whole = self.dy.new_zeros(self.shape)
        self.layout.add_used(whole if self.layout.transposed else whole.t(), self.x.t() @ self.dy)
        return whole
