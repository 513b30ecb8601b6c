"""The memory layout of the weight of a linear layer, and its products in that layout.

Shape letters: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from ds_npu.parallel.tensor.product import MatrixProduct, Multiplier, Product, WeightProduct
from ds_npu.parallel.tensor.sharding import Ranges


@dataclass(frozen=True)
class WeightLayout:
    """The memory layout of a weight, the outputs that are computed from it, and their kind of product."""

    transposed: bool = False
    """Whether the weight is [K, N] (GPT-2's Conv1D) in place of [N, K]."""
    outputs: Ranges | None = None
    """The outputs that are computed, for a weight that is whole on every rank, one perhaps twice; None: all of them."""
    product: Product | None = None
    """The kind of product; None: torch's kernels."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The matrix [K, N] by which activations are multiplied."""
        matrix = self.matrix(weight)
        return matrix if self.product is None else Multiplier.of(matrix, self.product.forward)

    def input_gradient(self, weight: torch.Tensor) -> torch.Tensor:
        """The matrix [N, K] by which gradients of outputs are multiplied."""
        matrix = self.matrix(weight).t()
        return matrix if self.product is None else Multiplier.of(matrix, self.product.input_gradient)

    def weight_gradient(self, weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> WeightProduct:
        """The product of the gradient of ``weight`` from ``x`` [..., K] and ``dy`` [..., N], for its sink."""
        if self.product is not None:
            return self.product.weight_gradient(x, dy, partial(replace(self, product=None).weight_gradient, weight))
        x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        if self.outputs is not None:
            return _PickedProduct(self, dy, x, weight.shape)
        return MatrixProduct(x, dy) if self.transposed else MatrixProduct(dy, x)

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """The part of ``weight`` that is used, [K, N]; a view where it is all of it."""
        matrix = weight if self.transposed else weight.t()
        return matrix if self.outputs is None else torch.cat(self._pieces(matrix), dim=-1)

    def used(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The part of ``bias`` that is used, [N]."""
        return bias if bias is None or self.outputs is None else torch.cat(self._pieces(bias), dim=-1)

    def bias_gradient(self, bias: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """The gradient of ``bias`` from ``dy`` [..., N]."""
        gradient = dy.reshape(-1, dy.shape[-1]).sum(dim=0)
        if self.outputs is None:
            return gradient
        whole = torch.zeros_like(bias)
        self.add_used(whole, gradient)
        return whole

    def add_used(self, whole: torch.Tensor, used: torch.Tensor) -> None:
        """Add ``used`` [..., N], of the outputs that are computed, to ``whole`` [..., outputs of the whole weight]."""
        pieces = self._pieces(whole)
        lengths = [each.shape[-1] for each in pieces]
        for piece, part in zip(pieces, torch.split(used, lengths, dim=-1), strict=True):
            piece += part

    def _pieces(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole.narrow(-1, start, stop - start) for start, stop in self.outputs or ()]


@dataclass(frozen=True)
class _PickedProduct:
    """The product for the ``outputs`` of a layout from dy [T, N] and x [T, K]; the weight's other outputs get 0."""

    layout: WeightLayout
    dy: torch.Tensor
    x: torch.Tensor
    shape: torch.Size
    """The shape of the weight."""

    @property
    def dtype(self) -> torch.dtype:
        return self.dy.dtype

    def gradient(self) -> torch.Tensor:
        whole = self.dy.new_zeros(self.shape)
        self.layout.add_used(whole if self.layout.transposed else whole.t(), self.x.t() @ self.dy)
        return whole

    def add_to(self, buffer: torch.Tensor) -> bool:
        return False
