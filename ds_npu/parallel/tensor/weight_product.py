"""Products whose sum is a weight's gradient: one for each use of the weight in a forward.

A product keeps its operands, so that it can be computed after its backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

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
