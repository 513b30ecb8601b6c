"""Which layers are swapped: every second, third, ... one, whose activations wait for backward on the host.

A swapped layer is copied while the layers behind it compute, up to the next swapped one, whose end waits for the copy
and lets go of the activations; in backward the beginning of that one begins the copy back, and the layer waits for it
(``ds_npu.memory.swapped_activations``, with a depth of 1). The last one stays on the device, of each pipeline stage. So
for one pattern it is known at every moment which layers are on the host, and what a step waits for. Pure: neither torch
nor DeepSpeed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ds_npu.models import names

STRIDES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Of the patterns that are tried."""
BACKWARD = 2.0
"""Times that a layer's backward takes of its forward, at least: two products of matrices for each one."""


@dataclass(frozen=True)
class SwapPattern:
    """The layers at ``places`` are swapped."""

    places: tuple[int, ...] = ()
    """Ascending; the last one of each stage stays on the device."""
    forward_seconds: tuple[float, ...] = ()
    """Of every layer of the rank."""
    bandwidth: float = math.inf
    """Bytes/s of copies in one direction."""
    ends: tuple[int, ...] = ()
    """Behind the layers of each pipeline stage of the rank but the last."""

    @cached_property
    def behind(self) -> dict[int, int]:
        """By layer that waits on the host, the swapped one behind it, of the same stage."""
        pairs = itertools.pairwise(self.places)
        return {place: after for place, after in pairs if not any(place < end <= after for end in self.ends)}

    @property
    def on_host(self) -> tuple[int, ...]:
        """The layers that wait on the host."""
        return tuple(self.behind)

    def count_on_host(self, place: int, calls: Sequence[int], forward: int | None) -> int:
        """How many calls of the layer at ``place`` are on the host, where ``calls`` wait for their backward.

        That are those that the next swapped layer has been called behind. ``forward``: the layer whose forward is
        running.
        """
        after = self.behind.get(place)
        return 0 if after is None else calls[after] - (forward == after)

    def wait_seconds(self, place: int, copied_bytes: int) -> float:
        """What a forward and backward wait for the copies of the layer at ``place``, out and back."""
        if place not in self.behind:
            return 0.0
        between = sum(self.forward_seconds[place + 1 : self.behind[place] + 1])
        copy = copied_bytes / self.bandwidth
        return max(0.0, copy - between) + max(0.0, copy - BACKWARD * between)


NOTHING_SWAPPED = SwapPattern()


def patterns(forward_seconds: Sequence[float], bandwidth: float, ends: Sequence[int] = ()) -> Iterator[SwapPattern]:
    """The patterns of layers that take so many seconds in forward: fewest copies first.

    ``ends``: behind the layers of each pipeline stage of the rank but the last.
    """
    seen: set[tuple[int, ...]] = set()
    begins = (0, *ends)
    for stride in reversed(STRIDES):
        stages = (range(begin, end, stride) for begin, end in zip(begins, (*ends, len(forward_seconds)), strict=True))
        places = tuple(itertools.chain.from_iterable(each for each in stages if len(each) > 1))
        if places and places not in seen:
            seen.add(places)
            yield SwapPattern(places, tuple(forward_seconds), bandwidth, tuple(ends))


def stage_ends(modules: Sequence[str], stages: Sequence[Collection[str]]) -> list[int]:
    """By pipeline stage on this rank that has any of ``modules``, how many there are up to its end.

    ``stages``: the blocks of each, where a rank has several.
    """
    places = [
        [place for place, name in enumerate(modules) if any(names.is_inside(name, block) for block in stage)]
        for stage in stages
    ]
    return [*sorted(each[0] for each in places if each)[1:], len(modules)]
