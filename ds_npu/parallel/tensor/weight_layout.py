"""How the weight of a linear layer is laid out in memory, and its gradient in that layout.

Shape letters: K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_npu.parallel.tensor.sharding import Ranges
from ds_npu.parallel.tensor.weight_gradient import GradientBuffer, weight_gradient


@dataclass(frozen=True)
class WeightLayout:
    """How a weight is laid out in memory, and which outputs are computed of it."""

    transposed: bool = False
    """[K, N] (GPT-2's Conv1D) in place of [N, K]."""
    outputs: Ranges | None = None
    """The outputs that are computed of a weight that is whole on every rank, one perhaps twice; None: all of them."""

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """The part of ``weight`` that is used, [K, N]; a view where it is all of it."""
        matrix = weight if self.transposed else weight.t()
        return matrix if self.outputs is None else torch.cat(self._pieces(matrix), dim=-1)

    def used(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The part of ``bias`` that is used, [N]."""
        return bias if bias is None or self.outputs is None else torch.cat(self._pieces(bias), dim=-1)

    def weight_gradient(
        self, weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor, buffer: GradientBuffer | None
    ) -> torch.Tensor | None:
        """The gradient of ``weight`` from [..., K] and [..., N]; None where it was added to the ``buffer``."""
        x, dy = _rows(x), _rows(dy)
        if self.outputs is None:
            return weight_gradient(buffer, x, dy) if self.transposed else weight_gradient(buffer, dy, x)
        whole = torch.zeros_like(weight)
        self._add(whole if self.transposed else whole.t(), x.t() @ dy)
        return whole

    def bias_gradient(self, bias: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """The gradient of ``bias`` from [..., N]."""
        gradient = _rows(dy).sum(dim=0)
        if self.outputs is None:
            return gradient
        whole = torch.zeros_like(bias)
        self._add(whole, gradient)
        return whole

    def _pieces(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole.narrow(-1, start, stop - start) for start, stop in self.outputs or ()]

    def _add(self, whole: torch.Tensor, used: torch.Tensor) -> None:
        pieces = self._pieces(whole)
        lengths = [each.shape[-1] for each in pieces]
        for piece, part in zip(pieces, torch.split(used, lengths, dim=-1), strict=True):
            piece += part


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])
