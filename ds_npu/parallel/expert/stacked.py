"""The weights of modules in a list as one tensor [E, ...]: a view where they are evenly spaced in memory, else a copy.

ZeRO 1 and 2 store the weights of a group contiguously in one buffer, in the order of the model; then nothing is
copied. Elsewhere (without ZeRO, under ZeRO 3) the copy lives until backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from ds_npu.ops.autograd import Context, applied


def stacked(pieces: Sequence[torch.Tensor], experts: int) -> torch.Tensor:
    """[E, n, ...] of E experts, each of which has the same number of ``pieces`` [n_i, ...], one expert's after another.

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
    """The strides of a contiguous tensor of ``shape``."""
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
