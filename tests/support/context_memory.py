"""The memory of context-parallel attention: what a rank must hold, from the algorithm's definition, and what it holds.

As many tokens on each rank, however many there are. None of it but what is gathered grows with the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from wire import Memory

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.ops.attention import Mask, Options
from ds_npu.parallel.context.attention import context_attention
from ds_npu.parallel.context.axis import ContextAxis

TOKENS, WIDTH = 64, 32
"""Tokens of a rank, width of a head."""


@dataclass(frozen=True)
class Bytes:
    """Of a rank's query (and out, and their gradients), of its key and value together, and of lse; ``wide``: how many
    times as large they are in the dtype in which gradients are summed."""

    query: int
    keys: int
    lse: int
    wide: int


def bytes_of(heads: int, key_heads: int, dtype: torch.dtype) -> Bytes:
    number = dtype.itemsize
    return Bytes(
        TOKENS * heads * WIDTH * number,
        2 * TOKENS * key_heads * WIDTH * number,
        TOKENS * heads * max(number, 4),
        max(4 // number, 1),
    )


def one_process_needs(each: Bytes) -> int:
    """q, k, v, out, lse, and the gradients of all but lse."""
    return 4 * each.query + 2 * each.keys + each.lse


def ring_needs(each: Bytes) -> int:
    """Of causal attention on four ranks or more, when the backward kernel of a step in the middle returns.

    q, k, v, out, lse and dout; the sum of dq; the step's dq, dk and dv, of which either dq or the others are of half
    the tokens; the gradients of the own keys and values; two blocks, this step's and the next one's; two sums of
    gradients, the one that is sent and the one that comes.
    """
    given = 3 * each.query + each.keys + each.lse
    of_step = max(each.query // 2 + each.keys, each.query + each.keys // 2)
    return given + each.wide * each.query + of_step + each.keys + 2 * each.keys + 2 * each.wide * each.keys


def double_ring_needs(each: Bytes, inner: int) -> int:
    """What a ring needs, of three inner rings or more.

    Two sums more, which go home and come home while an inner ring is computed, and the own gradients are such a sum,
    too. The block that comes from the inner ring before, and that which is sent to the next (in an inner ring of two
    it takes the place of the next step's).
    """
    home = 2 * each.wide * each.keys + (each.wide - 1) * each.keys
    return ring_needs(each) + home + (1 if inner == 2 else 2) * each.keys


def gathered_needs(each: Bytes, ranks: int) -> int:
    """Where each row sees every key, when their gradients have been sorted by ranks.

    q, k, v, out, lse, dout and dq; the gradients as the kernel gave them, and by ranks; and the sum that comes of this
    rank's own.
    """
    return 4 * each.query + each.keys + each.lse + ranks * each.keys + (ranks + 1) * each.wide * each.keys


def ulysses_needs(each: Bytes) -> int:
    """What one process needs, with fewer heads of more tokens, and what the caller has of its own tokens: q, k, v, out
    and dout. Where there are fewer key heads than ranks the keys of the former are more."""
    return one_process_needs(each) + 3 * each.query + each.keys


def hybrid_needs(each: Bytes) -> int:
    """What a ring needs, with fewer heads of more tokens, and what the caller has of its own tokens."""
    return ring_needs(each) + 3 * each.query + each.keys


def counted(axis: ContextAxis, heads: int, key_heads: int, dtype: torch.dtype, mask: Mask) -> int:
    """The peak of a forward and a backward with all their tensors, on the rank where it is highest.

    The least of five: gloo's threads may hold a message for a moment after it was received.
    """
    peaks = []
    for _ in range(5):
        dist.barrier()
        with Memory() as memory:
            q, k, v, dout = (
                torch.randn(1, TOKENS, n, WIDTH, dtype=dtype) for n in (heads, key_heads, key_heads, heads)
            )
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = context_attention(*leaves, axis, Options(mask=mask))
            torch.autograd.grad(out, leaves, dout)
        peaks.append(memory.peak)
    peak = torch.tensor(min(peaks))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


def needed(each: Bytes, algorithm: ContextAlgorithm) -> int:
    if algorithm.size == 1:
        return one_process_needs(each)
    if algorithm.gather:
        return gathered_needs(each, algorithm.ring)
    if algorithm.window > 1:
        return double_ring_needs(each, algorithm.window)
    if algorithm.ring == 1:
        return ulysses_needs(each)
    return ring_needs(each) if algorithm.ulysses == 1 else hybrid_needs(each)
