"""The cost of each operator of ``ds_npu.ops``, as a function of shapes and dtypes; without torch.

Each function takes the operator's arguments; a ``Shape`` may replace a tensor. Every tensor is read once
and every result written once, as a fused kernel does. FLOP are those of matrix products, 2 for each multiplication and
addition, as ``torch.utils.flop_counter`` counts them: an element-wise operator has 0, since its bytes take longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

FLOAT32_BYTES = INT32_BYTES = 4


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
    """The cost of one call of an operator."""

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
    """x: [..., D]; cos, sin: of shapes that broadcast to it."""
    return Cost(0, _bytes(x, cos, sin), _bytes(x))


def softmax_cost(x: Sized, mask: Sized | None = None) -> Cost:
    """x: [..., S, T]; mask: of a shape that broadcasts to it."""
    return Cost(0, _bytes(x, *([] if mask is None else [mask])), _bytes(x))


def cross_entropy_cost(logits_TV: Sized, targets_T: Sized) -> Cost:
    """logits: [T, V]; targets: [T]; the losses are float32 at least."""
    losses = Shape(tuple(targets_T.shape), max(FLOAT32_BYTES, logits_TV.itemsize))
    return Cost(0, _bytes(logits_TV, targets_T), _bytes(losses))


def matmul_accumulate_cost(buffer: Sized, dy: Sized, x: Sized) -> Cost:
    """buffer: [out, in], read and written; dy: [T, out]; x: [T, in]."""
    return Cost(2 * math.prod(dy.shape) * x.shape[1], _bytes(buffer, dy, x), _bytes(buffer))


def grouped_matmul_cost(x_PK: Sized, weight_EKN: Sized, counts_E: Sized) -> Cost:
    """x: [P, K]; weight: [E, K, N], of which the groups that have rows are read (all are counted)."""
    out = Shape((x_PK.shape[0], weight_EKN.shape[2]), x_PK.itemsize)
    return Cost(2 * math.prod(x_PK.shape) * weight_EKN.shape[2], _bytes(x_PK, weight_EKN, counts_E), _bytes(out))


def grouped_outer_cost(a_PM: Sized, b_PN: Sized, counts_E: Sized) -> Cost:
    """a: [P, M]; b: [P, N]; the result is [E, M, N]."""
    out = Shape((counts_E.shape[0], a_PM.shape[1], b_PN.shape[1]), a_PM.itemsize)
    return Cost(2 * math.prod(a_PM.shape) * b_PN.shape[1], _bytes(a_PM, b_PN, counts_E), _bytes(out))


def grouped_outer_accumulate_cost(buffer_EMN: Sized, a_PM: Sized, b_PN: Sized, counts_E: Sized) -> Cost:
    """buffer: [E, M, N], read and written; a: [P, M]; b: [P, N]."""
    flop = 2 * math.prod(a_PM.shape) * b_PN.shape[1]
    return Cost(flop, _bytes(buffer_EMN, a_PM, b_PN, counts_E), _bytes(buffer_EMN))


def token_permute_cost(x_NH: Sized, ids_NK: Sized, rows: int) -> Cost:
    """x: [N, H]; ids: [N, K]; the results are [rows, H] and N * K positions of int32."""
    out = Shape((rows, x_NH.shape[1]), x_NH.itemsize)
    positions = Shape(tuple(ids_NK.shape), INT32_BYTES)
    return Cost(0, _bytes(x_NH, ids_NK), _bytes(out, positions))


def token_unpermute_cost(rows_PH: Sized, positions_NK: Sized) -> Cost:
    """rows: [P, H]; positions: [N, K]; the result is [N, H]."""
    out = Shape((positions_NK.shape[0], rows_PH.shape[1]), rows_PH.itemsize)
    return Cost(0, _bytes(rows_PH, positions_NK), _bytes(out))


def adamw_cost(
    params: Sequence[Sized], grads: Sequence[Sized], exp_avgs: Sequence[Sized], exp_avg_sqs: Sequence[Sized]
) -> Cost:
    """Four lists of tensors, of which all but ``grads`` are read and written."""
    written = _bytes(*params, *exp_avgs, *exp_avg_sqs)
    return Cost(0, written + _bytes(*grads), written)


def orthogonalisation_cost(x_BRC: Sized, written_itemsize: int, parts: Sequence[int], gram: bool) -> Cost:
    """The iteration of Muon on x_BRC: [matrices, rows, columns], whose results have elements of ``written_itemsize``.

    ``parts``: the steps made on each Gram matrix, with ``gram`` and where a matrix is not square; else only their sum
    counts.
    """
    batch, short, long = x_BRC.shape[0], *sorted(x_BRC.shape[1:])
    wide = 2.0 * batch * short * short * long
    square = 2.0 * batch * short**3
    if gram and short < long:
        # Of each part the Gram matrix and the last product; between two steps the next Gram matrix and the product.
        flop = sum(2 * wide + steps * square + (steps - 1) * 3 * square for steps in parts)
    else:
        flop = sum(parts) * (2 * wide + square)
    return Cost(flop, _bytes(x_BRC), math.prod(x_BRC.shape) * written_itemsize)


def attention_forward_cost(q: Sized, k: Sized, v: Sized, pairs: float) -> Cost:
    """q: [B, S, N, D]; k, v: BSND, too. ``pairs``: rows times the keys that each sees, of all samples, for one head."""
    flop = 2 * pairs * q.shape[2] * (k.shape[3] + v.shape[3])
    return Cost(flop, _bytes(q, k, v), _bytes(_out(q, v), _lse(q)))


def attention_backward_cost(q: Sized, k: Sized, v: Sized, pairs: float) -> Cost:
    """Arguments are those of the forward. It computes the scores again, then the gradients of the weights, v, q and k:
    3 products with D and 2 with V. It reads out, its gradient and lse, too; lse has no gradient of its own."""
    flop = 2 * pairs * q.shape[2] * (3 * k.shape[3] + 2 * v.shape[3])
    return Cost(flop, _bytes(q, k, v, _out(q, v), _out(q, v), _lse(q)), _bytes(q, k, v))
