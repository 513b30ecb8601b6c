"""The change that reduces one parameter of experts to what this rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import nn

from ds_npu.features.declaration import Change
from ds_npu.parallel.runtime.placement import keep_expert_shard
from ds_npu.parallel.tensor.sharding import Sharding
from ds_npu.topology.degrees import Axis
from ds_npu.topology.topology import Topology


def expert_shard(name: str, parameter: nn.Parameter, shardings: Mapping[Axis, Sharding], topology: Topology) -> Change:
    """Reduce ``parameter`` to this rank's columns of this rank's experts."""
    ranks = {axis: topology.rank(axis) for axis in shardings}
    parts = [
        f"dim {each.dim} over {axis}: {each.length(ranks[axis]):,} of {each.size:,}" for axis, each in shardings.items()
    ]
    return Change("shards", name, "; ".join(parts), partial(keep_expert_shard, parameter, shardings, ranks))
