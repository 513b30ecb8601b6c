"""Experts of a checkpoint, and the state of their optimizer, for other numbers of ranks than wrote it.

Each file of experts says which ranges of the plain weight its rank held. A weight is put together from all files and
this rank's part of it is taken, one tensor after the other: files are mapped, not read whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_npu.engine.expert_states import GROUPS, OF_EXPERTS, STATE, State
from ds_npu.parallel.placement import placement_of
from ds_npu.parallel.tensor.sharding import Sharding
from ds_npu.topology.topology import Topology

MODULE, OPTIMIZER, SHARDED = "module", "optimizer", "ds_npu_shardings"
"""Keys of a file of experts: weights by name, the state dict of their optimizer, and their shardings by axis."""


def expert_shardings(model: nn.Module) -> State:
    """By name, how each weight of experts in ``model`` is sharded, as plain data."""
    return {
        name: {axis: (each.dim, each.size, each.ranges) for axis, each in placement_of(weight).sharded.items()}
        for name, weight in model.named_parameters()
        if placement_of(weight).is_expert
    }


@dataclass(frozen=True)
class WrittenExperts:
    """The files of all ranks of experts, etp the fastest."""

    files: Sequence[State]
    etp: int

    @property
    def can_be_reshaped(self) -> bool:
        """Whether they say where each element was, and have the whole state of an optimizer of torch."""
        told = all(SHARDED in each and each[OPTIMIZER] is not None and GROUPS in each[OPTIMIZER] for each in self.files)
        # Of experts in a list a rank has no state of those that it does not hold.
        return told and all(all(ranges) for each in self.files[0][SHARDED].values() for _, _, ranges in each.values())

    def of_rank(self, model: nn.Module, groups: Sequence[Mapping[str, Any]], topology: Topology) -> State:
        """The file that a rank of ``topology`` would have; ``groups``: the parameter groups of its optimizer."""
        weights = {name: each for name, each in model.named_parameters() if placement_of(each).is_expert}
        names = {id(each): name for name, each in weights.items()}
        modules, first = [each[MODULE] for each in self.files], self.files[0][OPTIMIZER]
        states = {}
        for group, written in zip(groups, first[GROUPS], strict=True):
            for weight, index in zip(group["params"], written["params"], strict=True):
                if group.get(OF_EXPERTS) and index in first[STATE]:
                    parts = [each[OPTIMIZER][STATE][index] for each in self.files]
                    states[index] = self._state(names[id(weight)], weight, parts, topology)
        return {
            MODULE: {
                name: self._part(name, each, [module[name] for module in modules], topology)
                for name, each in weights.items()
            },
            OPTIMIZER: {**first, STATE: states},
        }

    def _state(self, name: str, weight: nn.Parameter, parts: Sequence[State], topology: Topology) -> State:
        """The optimizer's state of one weight; what has not the weight's shape (a step) is the same on all ranks."""
        shape, found = self.files[0][MODULE][name].shape, {}
        for key, value in parts[0].items():
            is_shaped = isinstance(value, torch.Tensor) and value.shape == shape
            found[key] = self._part(name, weight, [each[key] for each in parts], topology) if is_shaped else value
        return found

    def _part(self, name: str, weight: nn.Parameter, parts: Sequence[torch.Tensor], topology: Topology) -> torch.Tensor:
        """This rank's part of a tensor of the shape of ``weight``."""
        written = {axis: Sharding(*each) for axis, each in self.files[0][SHARDED][name].items()}
        if "etp" in written:
            rows = [parts[start : start + self.etp] for start in range(0, len(parts), self.etp)]
            parts = [written["etp"].assemble(row) for row in rows]
        whole = written["ep"].assemble(parts)
        for axis, sharding in placement_of(weight).sharded.items():
            whole = sharding.take(whole, topology.rank(axis))
        return whole
