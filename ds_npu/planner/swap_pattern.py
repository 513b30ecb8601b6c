"""Patterns of swapped layers: every second, third, ... one, whose activations wait for backward on the host.

A swapped layer is copied while the layers after it compute, up to the next swapped one, whose end waits for the copy
and releases the activations; in backward the start of that one begins the copy back, and the layer waits for it
(``ds_npu.memory.swapped_activations``, with a depth of 1). The last swapped layer of each pipeline stage remains on the
device. So a pattern tells which layers are on the host at every moment, and how long a step waits. Pure: neither torch
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
"""Distances between the swapped layers of the patterns that are tried."""
BACKWARD = 2.0
"""Least ratio of a layer's backward to its forward: two products of matrices for each one."""


@dataclass(frozen=True)
class SwapPattern:
    """The layers at the indices ``layers`` are swapped."""

    layers: tuple[int, ...] = ()
    """Ascending; the last one of each stage remains on the device."""
    forward_seconds: tuple[float, ...] = ()
    bandwidth: float = math.inf
    """Bytes/s of copies in one direction."""
    ends: tuple[int, ...] = ()
    """Index after the last layer of each pipeline stage of the rank but the last."""

    @cached_property
    def behind(self) -> dict[int, int]:
        """For each layer that waits on the host, the next swapped layer of its stage."""
        return {
            index: after
            for index, after in itertools.pairwise(self.layers)
            if not any(index < end <= after for end in self.ends)
        }

    @property
    def on_host(self) -> tuple[int, ...]:
        """The layers that wait on the host."""
        return tuple(self.behind)

    def count_on_host(self, index: int, calls: Sequence[int], forward: int | None) -> int:
        """How many calls of the layer at ``index`` are on the host, where ``calls`` wait for their backward.

        The next swapped layer has been called after each of these. ``forward``: the layer whose forward is running.
        """
        after = self.behind.get(index)
        return 0 if after is None else calls[after] - (forward == after)

    def wait_seconds(self, index: int, copied_bytes: int) -> float:
        """Seconds that a forward and backward wait for the copies of the layer at ``index``, out and back."""
        if index not in self.behind:
            return 0.0
        between = sum(self.forward_seconds[index + 1 : self.behind[index] + 1])
        copy = copied_bytes / self.bandwidth
        return max(0.0, copy - between) + max(0.0, copy - BACKWARD * between)


NOTHING_SWAPPED = SwapPattern()


def patterns(forward_seconds: Sequence[float], bandwidth: float, ends: Sequence[int] = ()) -> Iterator[SwapPattern]:
    """Patterns of layers that take these seconds in forward, the fewest copies first.

    ``ends``: the index after the last layer of each pipeline stage of the rank but the last.
    """
    seen: set[tuple[int, ...]] = set()
    for stride in reversed(STRIDES):
        bounds = zip((0, *ends), (*ends, len(forward_seconds)), strict=True)
        stages = (range(begin, end, stride) for begin, end in bounds)
        layers = tuple(itertools.chain.from_iterable(each for each in stages if len(each) > 1))
        if layers and layers not in seen:
            seen.add(layers)
            yield SwapPattern(layers, tuple(forward_seconds), bandwidth, tuple(ends))


def stage_ends(modules: Sequence[str], stages: Sequence[Collection[str]]) -> list[int]:
    """The number of ``modules`` up to the end of each pipeline stage on this rank that has any.

    ``stages``: the blocks of each, where a rank has several.
    """
    layers = [
        [index for index, name in enumerate(modules) if any(names.is_inside(name, block) for block in stage)]
        for stage in stages
    ]
    return [*sorted(each[0] for each in layers if each)[1:], len(modules)]
