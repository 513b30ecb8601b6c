"""Embedding and head that share one weight and stand on two pipeline ranks: equal weights, and one gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_npu.parallel.pipeline.pass_through import TIED_APART
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.gradient_norm import REPLICATED
from ds_npu.zero_ext.pending_gradients import Slot


def tied_group(topology: Topology, first: int, last: int) -> dist.ProcessGroup:
    """The group of the pipeline ranks ``first`` and ``last``; of itself alone for another rank. All ranks call it."""
    others = [[rank] for rank in range(topology.size("pp")) if rank not in (first, last)]
    return topology.within("pp", [[first, last], *others], "tied weights")


def equalise_tied(model: nn.Module, topology: Topology, rank_of: Sequence[int]) -> None:
    """Give the head the embedding's values, and let one of both count in norms. All ranks call it."""
    if rank_of[0] == rank_of[-1]:
        return
    group = tied_group(topology, rank_of[0], rank_of[-1])
    for weight in model.parameters():
        if TIED_APART.get(weight):
            # The model is still on the host, and NPUs' groups send nothing from there.
            values = weight.data.to(get_accelerator().current_device_name())
            dist.broadcast(values, group=group, group_src=0 if rank_of[0] < rank_of[-1] else 1)
            weight.data.copy_(values)
            REPLICATED.set(weight, topology.rank("pp") == rank_of[-1])


class TiedGradients:
    """Adds up the gradients that the two ranks of a tied weight have of it."""

    def __init__(self, slots: Sequence[Slot], topology: Topology, rank_of: Sequence[int]) -> None:
        """All ranks make it. ``slots``: of all weights; ``rank_of``: by stage, its pipeline rank."""
        self._slots = [slot for slot in slots if TIED_APART.get(slot.weight)]
        if rank_of[0] != rank_of[-1]:
            self._group = tied_group(topology, rank_of[0], rank_of[-1])

    @torch.no_grad()
    def add_up(self) -> None:
        """Sum the accumulated gradients over both ranks; of one without a gradient it is zero."""
        for slot in self._slots:
            value = slot.value()
            if value is None:
                slot.add(torch.zeros_like(slot.weight))
                value = slot.value()
            assert value is not None, "it was added"
            dist.all_reduce(value, group=self._group)
