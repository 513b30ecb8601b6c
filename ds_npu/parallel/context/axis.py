"""The context axis as attention sees it: this rank's place in its Ulysses group and ring, and their communicators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.topology.topology import Topology

Parts = list[list[int]]


@dataclass(frozen=True)
class Ring:
    """The communicators of a rank's ring: two, for through one it would send and receive by turns.

    The link from place i to the next one goes through number i % 2, so that what comes to a rank and what goes have one
    each. Of an odd ring both are the same: with two, its first rank would send and receive through number 0 alone, and
    the others could not open number 1, which takes all. torch_npu has a communicator for each pair of ranks as well
    (unless P2P_HCCL_BUFFSIZE is 0), of which a ring of three or more ranks needs no second. ``ranks`` are global.
    """

    ranks: Sequence[int]
    rank: int
    window: int
    group: Any
    inner: tuple[Any, Any]
    outer: tuple[Any, Any]


@dataclass(frozen=True, eq=False)
class ContextAxis:
    """What attention needs to know of the context ranks."""

    topology: Topology
    algorithm: ContextAlgorithm
    rank: int
    ring_rank: int
    ulysses_rank: int
    ulysses_group: Any
    ring_group: Any
    ring: Ring | None
    """None where nothing travels: with one ring rank, or where keys and values are gathered."""

    @property
    def size(self) -> int:
        return self.algorithm.size


def context_axis(topology: Topology, algorithm: ContextAlgorithm) -> ContextAxis:
    """The context axis of ``topology`` with ``algorithm``; all ranks of the world call it at the same time.

    Raises ValueError where the algorithm is for another number of ranks.
    """
    size, rank = topology.size("cp"), topology.rank("cp")
    if algorithm.size != size:
        raise ValueError(f"{algorithm} is for {algorithm.size} context ranks; ds_npu.parallel.context is {size}")
    u, n = algorithm.ulysses, algorithm.ring
    ring_rank, ulysses_rank = algorithm.place(rank)
    rings = [[place * u + inside for place in range(n)] for inside in range(u)]
    ulysses_group = topology.within(
        "cp", [[place * u + inside for inside in range(u)] for place in range(n)], "ulysses"
    )
    ring_group = topology.within("cp", rings, "ring")
    ring = None
    if n > 1 and not algorithm.gather:
        ranks = [topology.ranks("cp")[place] for place in rings[ulysses_rank]]
        ring = Ring(ranks, ring_rank, algorithm.inner, ring_group, *_links(topology, algorithm, rings))
    return ContextAxis(
        topology, algorithm, rank, ring_rank, ulysses_rank, ulysses_group if u > 1 else None, ring_group, ring
    )


def _links(topology: Topology, algorithm: ContextAlgorithm, rings: Parts) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    window = algorithm.inner
    inner = [ring[first : first + window] for ring in rings for first in range(0, len(ring), window)]
    outer = [ring[place::window] for ring in rings for place in range(window)]
    return _both(topology, inner, "inner ring"), _both(topology, outer, "outer ring")


def _both(topology: Topology, parts: Parts, name: str) -> tuple[Any, Any]:
    """The communicators of rings that all have as many ranks; none where that is one."""
    size = len(parts[0])
    if size == 1:
        return None, None
    first = topology.within("cp", parts, name)
    return first, first if size % 2 else topology.within("cp", parts, f"{name}, second", own=True)
