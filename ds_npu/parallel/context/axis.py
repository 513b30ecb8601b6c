"""The context axis as attention sees it: this rank's indices in its Ulysses group and ring, and their communicators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ds_npu.comm.communicator import Link
from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.topology.topology import Topology

Parts = list[list[int]]
"""Groups of context ranks."""
Links = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]
"""The two communicators of one ring; None in a ring of one rank."""


@dataclass(frozen=True)
class Ring:
    """The communicators of a rank's ring (or double ring): two of each, so that sending and receiving overlap.

    The link from rank i to rank i + 1 uses communicator i % 2, so that a rank receives through one and sends through
    the other. In an odd ring both are the same: with two, its first rank would send and receive through number 0 alone,
    and the other ranks could not open number 1, which needs all of them. torch_npu has a communicator for each pair of
    ranks as well (unless P2P_HCCL_BUFFSIZE is 0), of which a ring of three or more ranks needs no second. ``ranks`` are
    global, ``window`` is the size of an inner ring.
    """

    ranks: Sequence[int]
    rank: int
    window: int
    group: dist.ProcessGroup
    inner: Links
    outer: Links

    def links(self) -> list[Link]:
        """All links between neighbours of its inner and outer rings, in the same order on every rank."""
        size, window = len(self.ranks), self.window
        found = []
        for groups, index, stride, count in (
            (self.inner, self.rank % window, 1, window),
            (self.outer, self.rank // window, window, size // window),
        ):
            around = [self.ranks[self.rank + (each - index) * stride] for each in range(count)]
            # Links from every other rank come first: they are opened side by side.
            for at in sorted(range(count), key=lambda each: (each % 2, each)):
                group = groups[at % 2]
                if group is not None:
                    found.append(Link(group, around[at], around[(at + 1) % count]))
        return found


@dataclass(frozen=True, eq=False)
class ContextAxis:
    """This rank's position among the context ranks, and the process groups that attention uses."""

    topology: Topology
    algorithm: ContextAlgorithm
    rank: int
    ring_rank: int
    ulysses_rank: int
    ulysses_group: dist.ProcessGroup | None
    """None in a group of one rank."""
    ring_group: dist.ProcessGroup
    ring: Ring | None
    """None with one ring rank, and where keys and values are gathered."""

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
    ring_rank, ulysses_rank = algorithm.ring_and_inner_rank(rank)
    rings = [[index * u + inside for index in range(n)] for inside in range(u)]
    ulysses_group = topology.within(
        "cp", [[index * u + inside for inside in range(u)] for index in range(n)], "Ulysses"
    )
    ring_group = topology.within("cp", rings, "ring")
    ring = None
    if n > 1 and not algorithm.gather:
        ranks = [topology.ranks("cp")[each] for each in rings[ulysses_rank]]
        ring = Ring(ranks, ring_rank, algorithm.inner, ring_group, *_links(topology, algorithm, rings))
    return ContextAxis(
        topology, algorithm, rank, ring_rank, ulysses_rank, ulysses_group if u > 1 else None, ring_group, ring
    )


def _links(topology: Topology, algorithm: ContextAlgorithm, rings: Parts) -> tuple[Links, Links]:
    window = algorithm.inner
    inner = [ring[first : first + window] for ring in rings for first in range(0, len(ring), window)]
    outer = [ring[inside::window] for ring in rings for inside in range(window)]
    return _two_communicators(topology, inner, "inner ring"), _two_communicators(topology, outer, "outer ring")


def _two_communicators(topology: Topology, parts: Parts, name: str) -> Links:
    """The two communicators of rings of one size; None for rings of one rank."""
    size = len(parts[0])
    if size == 1:
        return None, None
    first = topology.within("cp", parts, name)
    return first, first if size % 2 else topology.within("cp", parts, f"{name}, second", own=True)
