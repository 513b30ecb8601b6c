"""Who has whose keys and values when: rings, and rings of rings, as a table of steps that every rank knows.

Ring rank r = O * w + I stands at I of the inner ring O, of w ranks. In round a it computes with the keys and values of
inner ring O - a, which come around its own ring one step at a time; those that begin the next round come from the same
place of the ring before, during the whole of this round. The gradients of a block are summed from rank to rank of a
ring, and the sum goes home. Sources: Liu 2023, arXiv:2310.01889 (ring); Gu 2024, LoongTrain, arXiv:2406.18485, 4.2
(double ring).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Link = Literal["inner", "outer", "home"]
"""To the next place of the inner ring; to the same place of the next inner ring; to whom the gradients belong."""


class Hop(NamedTuple):
    """A message to ring rank ``to`` and one from ``origin`` at the same time; what comes belongs to ``received``."""

    link: Link
    to: int
    origin: int
    received: int


class Step(NamedTuple):
    """One block: attention to the keys and values of ring rank ``source``."""

    source: int
    hops: tuple[Hop, ...]
    """Of the keys and values at hand, under way while they are computed with."""
    gradient: Hop | None
    """After the step, of the sum of their gradients; None: it stays."""
    adds: bool
    """Whether a sum from the step before, of another rank, is added first."""


def ring_steps(rank: int, size: int, window: int, last: int | None = None) -> list[Step]:
    """The steps of ring rank ``rank`` of ``size``, in inner rings of ``window`` ranks.

    A single ring (``window`` equal to ``size``) may end after the step with number ``last``: masks with a window need
    the nearest ranks only.
    """
    outer, inner = divmod(rank, window)
    rings, final = size // window, window - 1 if last is None else last

    def at(ring: int, place: int) -> int:
        return ring % rings * window + place % window

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
