"""The coordinates of this rank in the grid, and the process groups along its axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ds_npu.topology.degrees import Axis, Degrees

ALONE = "ds_npu_alone"
"""The backend of a group of one rank: every collective is the identity, and no communicator is opened."""

GROUPS: tuple[tuple[Axis, ...], ...] = (("dp", "cp"), ("dp",), ("cp",), ("tp",), ("pp",), ("pp", "tp"))
"""The groups DeepSpeed asks for, in the order in which every rank makes them."""

EXPERT_GROUPS: tuple[tuple[Axis, ...], ...] = (("edp",), ("ep", "etp"), ("ep",), ("etp",), ("pp", "ep", "etp"))
"""The groups of the expert view, which are made where it shards anything (ep * etp > 1)."""

BackendOptions = Callable[[tuple[int, ...], str], c10d.Backend.Options | None]
"""Gives the backend options (the buffer's size) of a communicator by its global ranks; None: the backend's own.

The name is empty for groups along axes, and that of ``Topology.within`` for others.
"""

GroupsByRanks = dict[tuple[int, ...], dist.ProcessGroup | None]
"""Groups by their global ranks; None for a group that is one rank other than this one."""


def _alone(
    options: c10d._DistributedBackendOptions, backend_options: c10d.Backend.Options | None
) -> c10d.FakeProcessGroup:
    """torch's FakeProcessGroup copies inputs to outputs; with one rank that is what each collective means."""
    # torch's type stub leaves the third argument out.
    make: Callable[..., c10d.FakeProcessGroup] = c10d.FakeProcessGroup._create_internal
    return make(options.group_rank, options.group_size, backend_options)


class Topology:
    """The ranks of each group along each axis, with the process groups. It is passed, never fetched.

    Every rank of an initialised world makes it at the same time, as new_group demands. Axes with the same ranks have
    one group; an axis of size 1 opens no communicator.

    Raises ValueError where the degrees do not fill the world.
    """

    def __init__(self, degrees: Degrees, options: BackendOptions = lambda ranks, name: None) -> None:
        if degrees.world_size != dist.get_world_size():
            raise ValueError(
                f"the degrees {degrees} make a world of {degrees.world_size} ranks; this one has "
                f"{dist.get_world_size()}"
            )
        if ALONE not in dist.Backend.backend_list:
            devices = ["cpu", "cuda", torch._C._get_privateuse1_backend_name()]
            dist.Backend.register_backend(ALONE, _alone, extended_api=True, devices=devices)
        self.degrees = degrees
        self.global_rank = dist.get_rank()
        self.coordinates = degrees.coordinates(self.global_rank)
        self._options = options
        self._ranks: dict[tuple[Axis, ...], list[int]] = {}
        self._groups: GroupsByRanks = {tuple(range(degrees.world_size)): dist.group.WORLD}
        self._own: dict[str, GroupsByRanks] = {}
        for axes in (*GROUPS, *(EXPERT_GROUPS if degrees.ep * degrees.etp > 1 else ())):
            for ranks in map(tuple, degrees.groups(*axes)):
                if ranks not in self._groups:
                    self._groups[ranks] = self._open(ranks, "x".join(axes))

    def _open(self, ranks: tuple[int, ...], axes: str, name: str = "") -> dist.ProcessGroup | None:
        """The group of ``ranks``, which every rank of the world opens; a group of one rank is None on the others."""
        group: dist.ProcessGroup | None = None
        if len(ranks) > 1:
            group = dist.new_group(
                list(ranks), pg_options=self._options(ranks, name), group_desc=f"{axes} {name}".strip()
            )
        elif self.global_rank in ranks:
            group = dist.new_group(list(ranks), backend=ALONE, use_local_synchronization=True)
        return group

    def within(self, axis: Axis, parts: Sequence[Sequence[int]], name: str, own: bool = False) -> dist.ProcessGroup:
        """The process group of this rank's part of ``axis``; ``parts`` are lists of ranks along it.

        Every rank of the world calls it at the same time. An open group of the same ranks is used again, unless the
        part is to have its ``own`` communicator, one for each ``name``. Raises ValueError where no part has this rank.
        """
        mine: dist.ProcessGroup | None = None
        for peers in self.degrees.groups(axis):
            for part in parts:
                ranks = tuple(peers[rank] for rank in part)
                known = self._own.setdefault(name, {}) if own else self._groups
                if ranks not in known:
                    known[ranks] = self._open(ranks, axis, name)
                mine = known[ranks] if self.global_rank in ranks else mine
        if mine is None:
            raise ValueError(f"rank {self.rank(axis)} along {axis} is in none of {parts}")
        return mine

    def ranks(self, *axes: Axis) -> list[int]:
        """The global ranks of this rank's group along ``axes``, in grid order."""
        if axes not in self._ranks:
            self._ranks[axes] = next(ranks for ranks in self.degrees.groups(*axes) if self.global_rank in ranks)
        return self._ranks[axes]

    def group(self, *axes: Axis) -> dist.ProcessGroup:
        """This rank's process group along ``axes``; one of ``GROUPS``, or of ``EXPERT_GROUPS`` where experts are."""
        group = self._groups[tuple(self.ranks(*axes))]
        assert group is not None, "this rank is in it"
        return group

    def stage_group(self, name: str) -> dist.ProcessGroup:
        """The process group of this rank's pipeline stage; every rank of the world calls it at the same time.

        ``name``: of the communicator, where there are several stages.
        """
        mine: dist.ProcessGroup | None = None
        for ranks in map(tuple, self.degrees.groups("dp", "cp", "tp")):
            if ranks not in self._groups:
                self._groups[ranks] = self._open(ranks, "dpxcpxtp", name)
            mine = self._groups[ranks] if self.global_rank in ranks else mine
        assert mine is not None, "this rank is in a stage"
        return mine

    def group_of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The first group that was made of the global ``ranks``, in grid order; None where there is none."""
        return self._groups.get(ranks)

    def size(self, *axes: Axis) -> int:
        return len(self.ranks(*axes))

    def rank(self, *axes: Axis) -> int:
        """This rank's index in its group along ``axes``."""
        return self.ranks(*axes).index(self.global_rank)

    def neighbour(self, axis: Axis, step: int) -> int:
        """The global rank ``step`` ranks further along ``axis``, around the ring."""
        ranks = self.ranks(axis)
        return ranks[(self.rank(axis) + step) % len(ranks)]


class PlannedTopology(Topology):
    """The Topology of one rank of a planned world: sizes and coordinates, and groups that cannot communicate."""

    def __init__(self, degrees: Degrees, global_rank: int = 0) -> None:
        self.degrees, self.global_rank = degrees, global_rank
        self.coordinates = degrees.coordinates(global_rank)
        self._ranks, self._groups, self._own = {}, {}, {}

    def _open(self, ranks: tuple[int, ...], axes: str, name: str = "") -> dist.ProcessGroup | None:
        if self.global_rank not in ranks:
            return None
        return dist.ProcessGroup(c10d.HashStore(), ranks.index(self.global_rank), len(ranks))

    def group(self, *axes: Axis) -> dist.ProcessGroup:
        group = self._open(tuple(self.ranks(*axes)), "x".join(axes))
        assert group is not None, "this rank is in it"
        return group
