"""What each operator of ``ds_npu.ops`` costs, as a function of shapes and dtypes; without torch.

Each function takes what the operator takes, without the numbers: tensors, or their ``Shape``. Every tensor is read once
and every result written once, as a fused kernel does. FLOP are those of matrix products, 2 for each multiplication and
addition, as ``torch.utils.flop_counter`` counts them: an element-wise operator has 0, since its bytes take longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

FLOAT32_BYTES = 4


class Sized(Protocol):
    """A tensor, or its ``Shape``."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def itemsize(self) -> int: ...


class Shape(NamedTuple):
    """The shape of a tensor, and the bytes of an element."""

    shape: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class Cost:
    """Of one call of an operator."""

    flop: float
    read_bytes: int
    written_bytes: int


def _bytes(*tensors: Sized) -> int:
    return sum(math.prod(each.shape) * each.itemsize for each in tensors)


def _lse(q: Sized) -> Shape:
    return Shape(tuple(q.shape[:3]), max(FLOAT32_BYTES, q.itemsize))


def _out(q: Sized, v: Sized) -> Shape:
    return Shape((*q.shape[:3], v.shape[3]), q.itemsize)


def rms_norm_cost(x: Sized, weight: Sized) -> Cost:
    """x: [..., H]; weight: [H]."""
    return Cost(0, _bytes(x, weight), _bytes(x))


def add_rms_norm_cost(x: Sized, residual: Sized, weight: Sized) -> Cost:
    """x, residual: [..., H]; weight: [H]; writes the norm and the sum."""
    return Cost(0, _bytes(x, residual, weight), _bytes(x, residual))


def swiglu_cost(gate_up: Sized) -> Cost:
    """gate_up: any shape; the result has half of its elements."""
    return Cost(0, _bytes(gate_up), _bytes(gate_up) // 2)


def rotary_cost(x: Sized, cos: Sized, sin: Sized) -> Cost:
    """x: [..., D]; cos, sin: what broadcasts to it."""
    return Cost(0, _bytes(x, cos, sin), _bytes(x))


def softmax_cost(x: Sized, mask: Sized | None = None) -> Cost:
    """x: [..., S, T]; mask: what broadcasts to it."""
    return Cost(0, _bytes(x, *([] if mask is None else [mask])), _bytes(x))


def cross_entropy_cost(logits_TV: Sized, targets_T: Sized) -> Cost:
    """logits: [T, V]; targets: [T]; the losses are float32 at least."""
    losses = Shape(tuple(targets_T.shape), max(FLOAT32_BYTES, logits_TV.itemsize))
    return Cost(0, _bytes(logits_TV, targets_T), _bytes(losses))


def matmul_accumulate_cost(buffer: Sized, dy: Sized, x: Sized) -> Cost:
    """buffer: [out, in], read and written; dy: [T, out]; x: [T, in]."""
    return Cost(2 * math.prod(dy.shape) * x.shape[1], _bytes(buffer, dy, x), _bytes(buffer))


def adamw_cost(
    params: Sequence[Sized], grads: Sequence[Sized], exp_avgs: Sequence[Sized], exp_avg_sqs: Sequence[Sized]
) -> Cost:
    """Four lists of tensors, of which all but ``grads`` are read and written."""
    written = _bytes(*params, *exp_avgs, *exp_avg_sqs)
    return Cost(0, written + _bytes(*grads), written)


def attention_forward_cost(q: Sized, k: Sized, v: Sized, pairs: float) -> Cost:
    """q: [B, S, N, D]; k, v: BSND, too. ``pairs``: of a row and a key that it sees, of all samples, for each head."""
    flop = 2 * pairs * q.shape[2] * (k.shape[3] + v.shape[3])
    return Cost(flop, _bytes(q, k, v), _bytes(_out(q, v), _lse(q)))


def attention_backward_cost(q: Sized, k: Sized, v: Sized, pairs: float) -> Cost:
    """As the forward's, and with it scores again; then the gradients of the weights, v, q and k: 3 products with D
    and 2 with V. Reads out, its gradient and lse, too; lse has no gradient of its own."""
    flop = 2 * pairs * q.shape[2] * (3 * k.shape[3] + 2 * v.shape[3])
    return Cost(flop, _bytes(q, k, v, _out(q, v), _out(q, v), _lse(q)), _bytes(q, k, v))
