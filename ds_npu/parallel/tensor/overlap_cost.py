"""Estimated seconds of matrix products with the collectives of sequence parallelism, for each way of overlapping them.

Pure: without torch. Arithmetic is counted on whole tiles, so that small pieces of a product are known to be slow.
Copies of pieces that are not contiguous count, too, and what the host takes to launch all that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from ds_npu.topology.machine import Machine

FUSED, SERIAL, PIECES = 0, 1, (2, 4, 8)
"""Ways: one kernel for both, one after the other, or this number of pieces."""
LEAST_GAIN = 0.03
"""Part of the serial seconds that another way has to save: estimates are not better than that."""


class OverlapCall(NamedTuple):
    """One call of ``MatmulCollectives`` on one rank, in numbers that all ranks have in common."""

    collective: Literal["all_gather", "reduce_scatter"]
    ranks: int
    batch: int
    rows: int
    """Tokens of a rank's shard of one sample."""
    products: tuple[tuple[int, int], ...]
    """The inner and outer dimension of each product."""
    itemsize: int
    """Bytes of a number."""
    gathered: bool = True
    """Whether the caller wants what is gathered, too."""
    hides: bool = False
    """Whether the caller computes as many products before it waits for what is scattered."""

    @property
    def whole_bytes(self) -> int:
        """Bytes of the gathered tensor, or of the product that is scattered."""
        (inner, outer), *_ = self.products
        width = inner if self.collective == "all_gather" else outer
        return self.batch * self.rows * self.ranks * width * self.itemsize


def are_samples(batch: int, pieces: int) -> bool:
    """Whether the pieces are the samples of a batch, because ``batch`` is near ``pieces``.

    Samples are contiguous in the whole; else each piece is rows of every sample.
    """
    return batch > 1 and pieces > 1 and pieces <= 2 * batch <= 4 * pieces


def seconds_by_way(call: OverlapCall, machine: Machine, has_fused: bool) -> dict[int, float]:
    """The estimated seconds of ``call`` in each way; fused where ``has_fused`` and one node has all ranks.

    Where a batch has about as many samples as one of PIECES, its samples are the pieces.
    """
    near = math.gcd(call.ranks, machine.node)
    found = {SERIAL: _seconds(call, 1, near, machine)}
    for pieces in PIECES:
        if are_samples(call.batch, pieces):
            found[call.batch] = _seconds(call, call.batch, near, machine)
        elif pieces <= call.rows:
            found[pieces] = _seconds(call, pieces, near, machine)
    if has_fused and near == call.ranks:
        found[FUSED] = _fused_seconds(call, machine)
    return found


def fastest_way(seconds: Mapping[int, float]) -> int:
    """The way that takes the fewest ``seconds``; serial, where that is a way, unless another saves LEAST_GAIN of it."""
    best = min(seconds, key=lambda way: (seconds[way], way))
    return best if seconds[best] <= (1 - LEAST_GAIN) * seconds.get(SERIAL, math.inf) else SERIAL


def _seconds(call: OverlapCall, pieces: int, near: int, machine: Machine) -> float:
    """Seconds of ``call`` in ``pieces``, one of which is sent while another is multiplied."""
    part = call.whole_bytes / pieces
    message = machine.collective_seconds(call.collective, part, near, call.ranks // near)
    tokens = math.ceil(call.batch * call.rows / pieces) * call.ranks
    multiplied = _product_seconds(call, tokens, machine) + _copy_seconds(call, pieces, machine) / pieces
    slower = (pieces - 1) * max(message, multiplied)
    computed = pieces * multiplied
    ended = message + slower + multiplied
    if call.hides:
        ended = max(ended, 2 * computed) - computed
    operators = len(call.products) + len(_copied_widths(call, pieces))
    # The host has to keep ahead of the device.
    return max(ended, pieces * (machine.dispatch_collective + operators * machine.dispatch))


def _product_seconds(call: OverlapCall, tokens: int, machine: Machine) -> float:
    return sum(
        machine.operator_seconds(
            machine.product_seconds(tokens, outer, inner, call.itemsize),
            (tokens * (inner + outer) + inner * outer) * call.itemsize,
        )
        for inner, outer in call.products
    )


def _copied_widths(call: OverlapCall, pieces: int) -> list[int]:
    """Elements per token of each copy that a piece needs: pieces of rows are not contiguous in the whole."""
    if are_samples(call.batch, pieces) or (pieces == 1 and call.batch == 1):
        return []
    inner, outer = call.products[0]
    if pieces == 1:
        return [inner if call.collective == "all_gather" else outer]
    if call.collective == "reduce_scatter":
        return [inner for inner, _ in call.products]
    return [outer for _, outer in call.products] + ([inner] if call.gathered else [])


def _copy_seconds(call: OverlapCall, pieces: int, machine: Machine) -> float:
    """Seconds of the copies of all pieces."""
    moved = 2 * call.batch * call.rows * call.ranks * call.itemsize / pieces
    return pieces * sum(machine.operator_seconds(0.0, moved * width) for width in _copied_widths(call, pieces))


def _fused_seconds(call: OverlapCall, machine: Machine) -> float:
    """Seconds of a kernel that multiplies the widest matrix while it sends, and of the other products."""
    tokens = call.batch * call.rows * call.ranks
    (inner, outer) = widest = max(call.products, key=lambda sizes: sizes[1])
    others = list(call.products)
    others.remove(widest)
    sent = call.whole_bytes * (call.ranks - 1) / call.ranks
    message = machine.message + machine.sending_seconds(sent, call.ranks - 1, 0.0)
    arithmetic = machine.product_seconds(tokens, outer, inner, call.itemsize)
    moved = (tokens * (inner + outer) + inner * outer) * call.itemsize
    seconds = machine.operator_seconds(max(arithmetic, message), moved)
    seconds += _product_seconds(call._replace(products=tuple(others)), tokens, machine)
    if call.batch > 1:
        # The kernel has the ranks' rows one after the other, not the samples'.
        width = inner + outer if call.collective == "all_gather" else inner
        seconds += machine.operator_seconds(0.0, 2.0 * tokens * width * call.itemsize)
    return seconds
