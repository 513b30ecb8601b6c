"""The schedule of ring attention and of the double ring: a table of the block that a rank holds at each step.

Ring rank r = O * w + I has index I in inner ring O, of w ranks. In round a it computes with the keys and values of
inner ring O - a, which go around its own ring one step at a time; the block that begins the next round comes from
index I of inner ring O - 1, during the whole of this round. The gradients of a block are summed from rank to rank
of an inner ring, and the sum is sent to the owner of the block (the link "home"). Sources: Liu, Zaharia and Abbeel
2023, arXiv:2310.01889 (ring attention); Gu et al. 2024, LoongTrain, arXiv:2406.18485, 4.2 (double ring).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Link = Literal["inner", "outer", "home"]
"""Link to the next index of the inner ring; to the same index of the next inner ring; to the owner of the block."""


class Hop(NamedTuple):
    """Send a message to ring rank ``to``; receive one, of the block of ring rank ``received``, from ``origin``."""

    link: Link
    to: int
    origin: int
    received: int


class Step(NamedTuple):
    """One step: attention to the block, keys and values, of ring rank ``source``."""

    source: int
    hops: tuple[Hop, ...]
    """The messages that travel while this block is computed with."""
    gradient: Hop | None
    """The message of the block's gradients, summed so far, after the step; None: this rank owns the block."""
    adds: bool
    """Whether the gradients are added to the sum that the step before received."""


def ring_steps(rank: int, size: int, window: int, last: int | None = None) -> list[Step]:
    """The steps of ring rank ``rank`` of ``size``, in inner rings of ``window`` ranks.

    A single ring (``window`` equal to ``size``) may end after the step with number ``last``: masks with a window need
    the nearest ranks only.
    """
    outer, inner = divmod(rank, window)
    rings = size // window
    final = window - 1 if last is None else last

    def at(ring: int, index: int) -> int:
        return ring % rings * window + index % window

    steps = []
    for a in range(rings):
        for i in range(final + 1):
            source = at(outer - a, inner - i)
            hops = []
            if i < final:
                hops.append(Hop("inner", at(outer, inner + 1), at(outer, inner - 1), at(outer - a, inner - i - 1)))
            if i == 0 and a < rings - 1:
                hops.append(Hop("outer", at(outer + 1, inner), at(outer - 1, inner), at(outer - a - 1, inner)))
            gradient = None
            if source != rank and i == final:
                home = a > 0 or final < window - 1
                gradient = Hop("home" if home else "inner", source, at(outer + a, inner + final), rank)
            elif source != rank:
                gradient = Hop("inner", at(outer, inner + 1), at(outer, inner - 1), at(outer - a, inner - i - 1))
            steps.append(Step(source, tuple(hops), gradient, i > (a == 0)))
    return steps
