"""The ranks that hold the experts of a layer, and those that hold the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from ds_npu.topology.topology import Topology


@dataclass(frozen=True)
class ExpertAxis:
    """The ``ep`` x ``etp`` ranks that hold all experts of a layer; etp varies fastest.

    Rank p along ep holds consecutive experts: whole ones where etp is 1, else a shard of each expert's columns.
    """

    group: dist.ProcessGroup
    rank: int
    """This rank's index in ``group``."""
    ep: int
    etp: int
    same_tokens: dist.ProcessGroup | None = None
    """The tensor ranks that hold the same tokens, of which each sends a share; None where each holds its own."""

    @property
    def size(self) -> int:
        return self.ep * self.etp

    @property
    def ep_rank(self) -> int:
        return self.rank // self.etp

    @property
    def etp_rank(self) -> int:
        return self.rank % self.etp

    @staticmethod
    def of(topology: Topology, tokens_are_sharded: bool) -> ExpertAxis:
        """The axis of this rank; ``tokens_are_sharded``: whether sequence parallelism shards the tokens."""
        group = topology.group("ep", "etp")
        ep = topology.size("ep")
        etp = topology.size("etp")
        alike = topology.size("tp") > 1 and not tokens_are_sharded
        return ExpertAxis(group, topology.rank("ep", "etp"), ep, etp, topology.group("tp") if alike else None)
