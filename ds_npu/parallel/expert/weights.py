"""The weights of the experts of one rank, and their products.

Weights of modules in a list become one tensor [E, ...]: a view where they are evenly spaced in memory, else a copy.
ZeRO 1 and 2 store the weights of a group contiguously in one buffer, in the order of the model; then nothing is
copied. Elsewhere (without ZeRO, under ZeRO 3) the copy lives until backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ds_npu.ops.autograd import Context, applied
from ds_npu.ops.grouped_matmul import grouped_matmul, grouped_outer, grouped_outer_accumulate_
from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute
from ds_npu.parallel.tensor.product import WIDE, Product, WeightProduct
from ds_npu.parallel.tensor.weight_gradient import gradient_sink, taken

Activation = Callable[[torch.Tensor], torch.Tensor]
"""The function from outputs of ``up`` [P, F] to inputs of ``down`` [P, I], row by row."""

_WHOLE_SHAPE = TensorAttribute[torch.Size]("ds_shape")
"""The whole shape of a parameter that ZeRO-3 has partitioned."""


def is_experts(module: nn.Module) -> bool:
    """Whether ``module`` has a parameter of three dims, as stacked experts are, and none that is called weight."""
    own = dict(module.named_parameters(recurse=False))
    return "weight" not in own and any(len(_WHOLE_SHAPE.get(each) or each.shape) == 3 for each in own.values())


@dataclass(frozen=True)
class ExpertWeights:
    """All experts of this rank: y = down(activation(up(x))), with a gate within ``up`` where the activation has one."""

    up: torch.Tensor
    """[E, F, H], or [E, H, F] where ``is_transposed``; F is 2 I with a gate."""
    down: torch.Tensor
    """[E, H, I], or [E, I, H]."""
    activation: Activation
    is_transposed: bool = False
    up_bias: torch.Tensor | None = None
    """[E, F]."""
    down_bias: torch.Tensor | None = None
    """[E, H]; the biases of the ranks that share an expert are summed."""
    product: Product | None = field(default=None, kw_only=True)
    """The kind of product; None: the grouped kernels."""

    def forward(self, x_PK: torch.Tensor, weight: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """[P, N]: each expert's rows times its matrix in ``weight`` (this rank's own, or fetched with replicas)."""
        multiply = grouped_matmul if self.product is None else self.product.forward
        return multiply(x_PK, weight if self.is_transposed else weight.transpose(1, 2), counts_E)

    def input_gradient(self, dy_PN: torch.Tensor, weight: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """[P, K]: the gradient of the rows."""
        multiply = grouped_matmul if self.product is None else self.product.input_gradient
        return multiply(dy_PN, weight.transpose(1, 2) if self.is_transposed else weight, counts_E)

    def weight_gradient(self, x_PK: torch.Tensor, dy_PN: torch.Tensor, counts_E: torch.Tensor) -> WeightProduct:
        """The product that gives the gradient of a weight, for the weight's sink."""
        if self.product is not None:
            plain = partial(replace(self, product=None).weight_gradient, counts_E=counts_E)
            return self.product.weight_gradient(x_PK, dy_PN, plain)
        a, b = (x_PK, dy_PN) if self.is_transposed else (dy_PN, x_PK)
        return GroupedProduct(a, b, counts_E)

    def gradient_of(
        self, weight: torch.Tensor, x_PK: torch.Tensor, dy_PN: torch.Tensor, counts_E: torch.Tensor
    ) -> torch.Tensor | None:
        """The gradient of ``weight`` for autograd; None where its sink has taken the product."""
        return taken(gradient_sink(weight), self.weight_gradient(x_PK, dy_PN, counts_E))

    def __len__(self) -> int:
        return len(self.up)

    def to(self, dtype: torch.dtype) -> ExpertWeights:
        """These weights in ``dtype``, differentiable; this object itself where that is their dtype."""
        if self.up.dtype == dtype:
            return self
        up_bias, down_bias = (each if each is None else each.to(dtype) for each in (self.up_bias, self.down_bias))
        made = replace(self, up=self.up.to(dtype), down=self.down.to(dtype))
        return replace(made, up_bias=up_bias, down_bias=down_bias)


@dataclass(frozen=True)
class GroupedProduct(WeightProduct):
    """aᵀ b of each group of rows [P, M] and [P, N]: the gradient of a weight [E, M, N] of all experts."""

    a: torch.Tensor
    b: torch.Tensor
    counts: torch.Tensor
    """[E] int64."""

    @property
    def dtype(self) -> torch.dtype:
        return self.a.dtype

    def gradient(self) -> torch.Tensor:
        return grouped_outer(self.a, self.b, self.counts)

    def add_to(self, buffer: torch.Tensor) -> bool:
        if buffer.dtype not in WIDE:
            return False
        grouped_outer_accumulate_(buffer, self.a, self.b, self.counts)
        return True


def stacked(pieces: Sequence[torch.Tensor], experts: int) -> torch.Tensor:
    """Stack the weights of E experts, [E, n, ...]: each has equally many ``pieces`` [n_i, ...], listed by expert.

    Differentiable once; the gradients of the pieces are views of the result's gradient.
    """
    return _stack(experts, *pieces)


def _as_view(pieces: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor | None:
    """``pieces`` as one tensor without a copy; None where their layout in memory does not allow it."""
    first, each = pieces[0], len(pieces) // shape[0]
    storage = first.untyped_storage()
    same = all(piece.untyped_storage().data_ptr() == storage.data_ptr() for piece in pieces)
    if not same or not all(piece.is_contiguous() for piece in pieces):
        return None
    starts = [piece.storage_offset() for piece in pieces]
    experts = [starts[index : index + each] for index in range(0, len(starts), each)]
    ends = [start + piece.numel() for start, piece in zip(starts, pieces, strict=True)]
    behind = all(ends[i] == starts[i + 1] for i in range(len(pieces) - 1) if (i + 1) % each)
    strides = {after[0] - before[0] for before, after in itertools.pairwise(experts)} or {first.numel() * each}
    if not behind or len(strides) > 1 or min(strides) <= 0:
        return None
    return first.new_empty(0).set_(storage, starts[0], shape, (strides.pop(), *_strides(shape[1:])))


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


class _StackContext(Context):
    lengths: list[int]


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _StackContext, experts: int, *pieces: torch.Tensor) -> torch.Tensor:
        ctx.lengths = [len(piece) for piece in pieces]
        shape = (experts, sum(ctx.lengths) // experts, *pieces[0].shape[1:])
        found = _as_view(pieces, shape)
        return torch.cat(list(pieces)).view(shape) if found is None else found

    @staticmethod
    @once_differentiable
    def backward(ctx: _StackContext, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *torch.split(gradient.flatten(0, 1), ctx.lengths))


_stack = applied(_Stack, _Stack.forward)
