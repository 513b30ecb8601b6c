"""``ds_npu.moe.placement_interval``: after that many optimizer steps, experts move so that ranks have even loads.

Sources: MindSpeed (core/transformer/moe/expert_placement), which plans by a moving average of loads and gathers the
state of the optimizer before it is exchanged; here only experts that move are sent, from partition to partition.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_npu.log import logger
from ds_npu.models.zero3 import unpartitioned_shape
from ds_npu.parallel.expert.expert_map import (
    ExpertMap,
    MappedExperts,
    exchange_experts,
    heaviest,
    map_by_load,
    moves_between,
    plain_map,
    sharding_of_map,
)
from ds_npu.parallel.runtime.marks import Mark
from ds_npu.parallel.runtime.placement import placement_of, set_placement
from ds_npu.topology.degrees import Axis
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.expert_elements import ExpertElements, why_not_moved
from ds_npu.zero_ext.method_wraps import MethodLevel
from ds_npu.zero_ext.training_engine import TrainingEngine

KEY = "ds_npu.moe.placement_interval"
EXPERT_MAP = "ds_npu_expert_places"
"""The key of the expert maps in a checkpoint."""
MAPPED_EXPERTS: Mark[MappedExperts] = Mark("mapped experts")
"""Marks a module whose experts may move, with their map."""
VIEW: tuple[Axis, ...] = ("edp", "ep", "etp")
"""The axes of the ranks that hold a layer's experts and their copies."""
State = dict[str, Any]


def modules_with_map(model: nn.Module) -> dict[str, tuple[nn.Module, MappedExperts]]:
    """The modules whose experts may move, with their maps, by name."""
    every = ((name, module, MAPPED_EXPERTS.get(module)) for name, module in model.named_modules())
    return {name: (module, mapped) for name, module, mapped in every if mapped is not None}


class Relocation:
    """Moves the experts of a complete ``engine``; every rank makes and calls it at the same time.

    Raises ValueError where they cannot move.
    """

    def __init__(self, engine: TrainingEngine, interval: int) -> None:
        self._engine, self._interval = engine, interval
        self._topology = engine.topology
        self._layers = modules_with_map(engine.module)
        if reason := why_not_moved(engine) or (None if self._layers else "no experts were placed by ds_npu"):
            raise ValueError(f"{KEY}: found {interval}, but {reason}. What to do: that, or {KEY} 0")
        parameters = [each for module, _ in self._layers.values() for each in _weights(module)]
        self._elements = ExpertElements(engine, parameters, self._topology)
        self.sent_bytes = 0
        """The bytes of moved experts that this rank has sent to other ranks."""

    def relocate_in_time(self) -> None:
        """Relocate where the interval divides the number of the optimizer step that has ended."""
        if self._engine.global_steps % self._interval == 0:
            self.relocate()

    @torch.no_grad()
    def relocate(self) -> None:
        """Move experts by their loads since the last relocation, in every layer where it pays."""
        moved, before_bytes = [], self.sent_bytes
        loads_of = summed_loads(self._engine.module, self._topology)
        for name, (module, mapped) in self._layers.items():
            before = mapped.expert_map
            loads = loads_of[name]
            after = map_by_load(loads, before)
            if after != before:
                self._move(module, before, after)
                mean = sum(loads) / len(before)
                moved.append(f"{name} {heaviest(loads, before) / mean:.2f} -> {heaviest(loads, after) / mean:.2f}")
            mapped.start_again(after)
        if moved:
            self._elements.gather_again()
            sent = (self.sent_bytes - before_bytes) / 2**20
            text = "experts moved, the heaviest rank's load over the mean: %s; this rank sent %.1f MiB"
            logger().info(text, ", ".join(moved), sent)

    def _move(self, module: nn.Module, before: ExpertMap, after: ExpertMap) -> None:
        moves = list(moves_between(before, after))
        group = self._topology.group(*VIEW)
        for parameter in _weights(module):
            for held in self._elements.of(parameter):
                self.sent_bytes += exchange_experts(held, _size(parameter, before), moves, group)
            record_map(parameter, after)


def install_relocation(interval: int, engine: TrainingEngine) -> list[str]:
    """Move the experts of a complete ``engine`` after each optimizer step whose number ``interval`` divides.

    Raises ValueError where they cannot move.
    """
    engine.events.after_step(MethodLevel.RELOCATION, Relocation(engine, interval).relocate_in_time)
    return []


def record_map(parameter: nn.Parameter, expert_map: ExpertMap) -> None:
    """Record in the placement of the weight ``parameter`` that its experts are sharded by ``expert_map``."""
    placement = placement_of(parameter)
    sharded = {**placement.sharded, "ep": sharding_of_map(expert_map)}
    set_placement(parameter, dataclasses.replace(placement, sharded=sharded))


def summed_loads(model: nn.Module, topology: Topology) -> dict[str, list[int]]:
    """How often the tokens of all ranks chose each expert, by the name of each layer whose experts may move."""
    layers = modules_with_map(model)
    if not layers:
        return {}
    device = next(model.parameters()).device
    loads = [mapped.loads(device) for _, mapped in layers.values()]
    flat = torch.cat(loads)
    dist.all_reduce(flat, group=topology.group(*VIEW))
    # The host, which makes the plan, waits for the sums once in an interval.
    summed = [each.tolist() for each in torch.split(flat, [len(each) for each in loads])]
    return dict(zip(layers, summed, strict=True))


def state_of_maps(model: nn.Module, topology: Topology) -> State:
    """The expert map and the loads since the last relocation, by layer; every rank calls it."""
    loads = summed_loads(model, topology)
    layers = modules_with_map(model)
    return {name: {"places": mapped.expert_map, "loads": loads[name]} for name, (_, mapped) in layers.items()}


def restore_maps(model: nn.Module, state: State | None, topology: Topology) -> None:
    """Restore the ``state`` of ``state_of_maps`` before weights are loaded; None: experts are in the plain order.

    Raises ValueError where experts have moved and ``model`` does not keep a map of them.
    """
    layers, known = modules_with_map(model), state or {}
    for name, found in known.items():
        expert_map = tuple(map(tuple, found["places"]))
        if name not in layers and expert_map != plain_map(sum(map(len, expert_map)), len(expert_map)):
            raise ValueError(
                f"{KEY}: found 0, but the checkpoint's experts of {name} were moved. What to do: the {KEY} of the run "
                "that wrote it; or weights only: engine.save_pretrained in that run, from_pretrained in this one"
            )
    is_first = topology.rank(*VIEW) == 0
    for name, (module, mapped) in layers.items():
        plain = plain_map(mapped.experts, len(mapped.expert_map))
        found = known.get(name, {"places": plain, "loads": []})
        expert_map = tuple(map(tuple, found["places"]))
        # One rank keeps the sum of all ranks.
        mapped.start_again(expert_map, found["loads"] if is_first else [])
        for parameter in _weights(module):
            record_map(parameter, expert_map)


def _weights(module: nn.Module) -> list[nn.Parameter]:
    return [each for each in module.parameters(recurse=False) if placement_of(each).is_expert]


def _size(parameter: Any, expert_map: ExpertMap) -> int:
    """The number of elements of one expert in this rank's ``parameter``."""
    shape = unpartitioned_shape(parameter)
    assert shape[0] == len(expert_map[0])
    return torch.Size(shape[1:]).numel()
