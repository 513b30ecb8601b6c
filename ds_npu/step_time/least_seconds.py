"""The least seconds in which a machine computes a call of an operator, from the shapes in a trace.

A product takes the machine's rate of products, an attention that of attention; anything else reads and writes its
tensors once. Results that a trace does not show are as large as the largest argument.
"""

from __future__ import annotations

import math
from itertools import pairwise

from ds_npu.step_time.trace import ATTENTION, PRODUCTS, OperatorTensors, kind_of
from ds_npu.topology.machine import Machine

BACKWARD = 2.5
"""FLOP of the backward of an attention, which computes its scores again: 5 products for the forward's 2."""


def least_seconds(machine: Machine, name: str, work: OperatorTensors | None) -> float | None:
    """Seconds of one call of ``name``; None where shapes are not known, or say too little."""
    if work is None or not work.shapes:
        return None
    kind = kind_of(name)
    if kind == PRODUCTS:
        return _product(machine, work)
    if kind == ATTENTION:
        return _attention(machine, name, work)
    return machine.memory_seconds(_bytes(work)) if _bytes(work) else None


def _bytes(work: OperatorTensors) -> float:
    sizes = [math.prod(shape) * size for shape, size in zip(work.shapes, work.itemsizes, strict=True)]
    return float(sum(sizes) + (0 if work.outputs else max(sizes)))


def _product(machine: Machine, work: OperatorTensors) -> float | None:
    """Seconds of a product of two factors whose inner sizes agree on any side: CANN also takes them transposed."""
    arguments = list(zip(work.shapes, work.itemsizes, strict=True))
    if work.outputs:
        arguments = arguments[: -work.outputs]
    factors = [(shape, size) for shape, size in arguments if len(shape) in (2, 3)]
    result = work.shapes[-1] if work.outputs else None
    if result is not None and [len(shape) for shape, _ in factors] == [3, 2]:
        # One matrix for all samples.
        (first, size), second = factors
        factors = [((math.prod(first[:-1]), first[-1]), size), second]
        result = (math.prod(result[:-1]), result[-1])
    pairs = [(a, b) for a, b in pairwise(factors) if len(a[0]) == len(b[0])]
    for (a, size), (b, _) in reversed(pairs):
        found = _sizes(a, b, result)
        if found is not None and a[:-2] == b[:-2]:
            rows, columns, inner = found
            count = math.prod(a[:-2])
            arithmetic = machine.product_seconds(rows, columns, inner, size, count)
            return max(arithmetic, machine.memory_seconds(_bytes(work)))
    return None


def _sizes(a: tuple[int, ...], b: tuple[int, ...], result: tuple[int, ...] | None) -> tuple[int, int, int] | None:
    """Rows, columns and inner size of the product of ``a`` and ``b``, whose result has the shape ``result``."""
    if result is None or len(result) < 2:
        return (a[-2], b[-1], a[-1]) if a[-1] == b[-2] else None
    rows, columns = result[-2:]
    for high, inner in ((a[-2], a[-1]), (a[-1], a[-2])):
        for deep, wide in ((b[-2], b[-1]), (b[-1], b[-2])):
            if (high, inner, wide) == (rows, deep, columns):
                return rows, columns, inner
    return None


def _attention(machine: Machine, name: str, work: OperatorTensors) -> float | None:
    """Seconds of an attention of ATen: its arguments are q, k and v [B, N, S, D], in backward behind a gradient."""
    is_backward = "backward" in name.lower()
    arguments = work.shapes[1:4] if is_backward else work.shapes[:3]
    if not name.startswith("aten::") or len(arguments) < 3 or any(len(shape) != 4 for shape in arguments):
        return None
    (samples, heads, rows, width), (*_, keys, _), (*_, wide) = arguments
    flop = 2.0 * samples * heads * rows * keys * (width + wide) * (BACKWARD if is_backward else 1)
    return machine.attention_seconds(flop / 2 if work.is_causal else flop, keys)
