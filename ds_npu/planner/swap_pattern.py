"""Which layers are swapped: every second, third, ... one, whose activations wait for backward on the host.

A swapped layer is copied while the layers behind it compute, up to the next swapped one, whose end waits for the copy
and lets go of the activations; in backward the beginning of that one begins the copy back, and the layer waits for it
(``ds_npu.memory.swapped_activations``, with a depth of 1). The last one stays on the device. So for one pattern it is
known at every moment which layers are on the host, and what a step waits for. Pure: neither torch nor DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

STRIDES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Of the patterns that are tried."""
BACKWARD = 2.0
"""Times that a layer's backward takes of its forward, at least: two products of matrices for each one."""


@dataclass(frozen=True)
class SwapPattern:
    """The layers at ``places`` are swapped."""

    places: tuple[int, ...] = ()
    """Ascending; the last one stays on the device."""
    forward_seconds: tuple[float, ...] = ()
    """Of every layer of the model."""
    bandwidth: float = math.inf
    """Bytes/s of copies in one direction."""

    @property
    def on_host(self) -> tuple[int, ...]:
        """The layers that wait on the host."""
        return self.places[:-1]

    def next_of(self, place: int) -> int:
        """The swapped layer behind the one at ``place``."""
        return self.places[self.places.index(place) + 1]

    def on_host_at(self, calls: Sequence[int], is_inside: bool) -> frozenset[int]:
        """The layers that are on the host where ``calls`` wait for their backward.

        ``is_inside``: the forward of the last of them is running.
        """
        latest = max((place for place, count in enumerate(calls) if count), default=-1)
        return frozenset(place for place in self.on_host if calls[place] and self.next_of(place) + is_inside <= latest)

    def wait_seconds(self, place: int, copied_bytes: int) -> float:
        """What a forward and backward wait for the copies of the layer at ``place``, out and back."""
        if place not in self.on_host:
            return 0.0
        between = sum(self.forward_seconds[place + 1 : self.next_of(place) + 1])
        copy = copied_bytes / self.bandwidth
        return max(0.0, copy - between) + max(0.0, copy - BACKWARD * between)


NOTHING_SWAPPED = SwapPattern()


def patterns(forward_seconds: Sequence[float], bandwidth: float) -> Iterator[SwapPattern]:
    """The patterns of layers that take so many seconds in forward: fewest copies first."""
    seen = set()
    for stride in reversed(STRIDES):
        places = tuple(range(0, len(forward_seconds), stride))
        if len(places) > 1 and places not in seen:
            seen.add(places)
            yield SwapPattern(places, tuple(forward_seconds), bandwidth)
