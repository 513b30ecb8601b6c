"""Ranks as threads of this process, for probes that compare several ranks' results of a copy with one rank's."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ds_npu.comm.threads import ThreadGroup
from ds_npu.topology.degrees import Axis, Degrees
from ds_npu.topology.topology import Topology


@dataclass
class ProbeResult:
    """The findings of a probe."""

    faults: list[str] = field(default_factory=list)
    """Modules whose results differ, or that fail when sharded."""
    unseen: list[str] = field(default_factory=list)
    """Parts that could not be computed whole, and why."""


class ThreadTopology(Topology):
    """The Topology of ranks along ``axis`` that are threads of one process."""

    def __init__(self, group: ThreadGroup, axis: Axis = "tp") -> None:
        self.degrees = Degrees(**{axis: group.size()})
        self.global_rank = group.rank()
        self._ranks = {}
        self._groups = {tuple(range(group.size())): group}
        self._own = {}

    def _open(self, ranks: tuple[int, ...], axes: str, name: str = "") -> dist.ProcessGroup | None:
        """Open a group of one rank; raises ValueError for more: only the group of all threads exists."""
        if len(ranks) > 1:
            raise ValueError(f"threads have no group {name} of the ranks {ranks}")
        return ThreadGroup(0, threading.Barrier(1), [torch.empty(0)]) if self.global_rank in ranks else None


def first_tensor(out: object) -> torch.Tensor:
    found: torch.Tensor = next(each for each in pytree.tree_leaves(out) if isinstance(each, torch.Tensor))
    return found


@contextmanager
def nothing_drawn() -> Iterator[None]:
    """Restore the host's random generators; raise RuntimeError where something was drawn from them."""
    tensors = torch.random.get_rng_state()
    numbers = random.getstate()
    try:
        yield
        if not torch.random.get_rng_state().equal(tensors) or random.getstate() != numbers:
            raise RuntimeError("it draws random numbers in evaluation, too")
    finally:
        torch.random.set_rng_state(tensors)
        random.setstate(numbers)


def message_of(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
