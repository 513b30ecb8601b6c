"""The topology on real ranks: its groups are those of the grid, and an axis of one rank opens no communicator."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks

from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import ALONE, GROUPS, Topology


def groups_of(sizes: dict[str, int]) -> None:
    topology = Topology(Degrees(**sizes))
    me = dist.get_rank()
    for axes in GROUPS:
        group, ranks = topology.group(*axes), topology.ranks(*axes)
        assert dist.get_process_group_ranks(group) == ranks
        assert (dist.get_world_size(group), dist.get_rank(group)) == (topology.size(*axes), topology.rank(*axes))
        assert (dist.get_backend(group) == ALONE) == (len(ranks) == 1 < topology.degrees.world_size)
        mine = torch.tensor([float(me)])
        total, everyone = mine.clone(), torch.empty(len(ranks))
        dist.all_reduce(total, group=group)
        dist.all_gather_into_tensor(everyone, mine, group=group)
        assert (total.item(), everyone.tolist()) == (sum(ranks), ranks)
        part = torch.empty(1)
        dist.reduce_scatter_tensor(part, everyone.clone(), group=group)
        assert part.item() == me * len(ranks)
        dist.broadcast(mine, ranks[0], group=group)
        assert mine.item() == ranks[0]
        dist.barrier(group=group)
    for axis in ("pp", "dp", "cp", "tp"):
        after = topology.neighbour(axis, 1)
        coordinates = Topology(Degrees(**sizes)).degrees.coordinates(after)
        assert coordinates[axis] == (topology.coordinates[axis] + 1) % topology.size(axis)


@pytest.mark.parametrize(
    "sizes",
    [{"dp": 1}, {"dp": 3}, {"pp": 2, "cp": 2}, {"dp": 2, "cp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2}],
    ids=str,
)
def test_the_groups_are_those_of_the_grid(sizes):
    run_on_ranks(Degrees(**sizes).world_size, groups_of, sizes)


def equal_ranks_share() -> None:
    topology = Topology(Degrees(dp=2))
    assert topology.group("dp") is topology.group("dp", "cp") is dist.group.WORLD
    assert topology.group("tp") is topology.group("cp") is topology.group("pp", "tp")


def test_equal_ranks_are_one_group():
    run_on_ranks(2, equal_ranks_share)


def does_not_fill() -> None:
    with pytest.raises(ValueError, match="make a world of 4 ranks; this one has 2"):
        Topology(Degrees(dp=4))


def test_degrees_of_another_world():
    run_on_ranks(2, does_not_fill)
