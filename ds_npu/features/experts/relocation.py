"""``ds_npu.moe.placement_interval``: every so many optimizer steps, experts move to where their load is even.

Sources: MindSpeed (core/transformer/moe/expert_placement), which plans by a moving average of loads and gathers the
state of the optimizer before it is exchanged; here only what moves is sent, from each rank's part to each rank's part.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_npu.log import logger
from ds_npu.models.attributes import attribute
from ds_npu.models.zero3 import unpartitioned_shape
from ds_npu.parallel.expert.places import (
    Places,
    heaviest,
    moves_between,
    places_by_load,
    plain_places,
    sharding_of_places,
)
from ds_npu.parallel.expert.relocation import PlacedExperts, exchange_experts
from ds_npu.parallel.runtime.placement import placement_of, set_placement
from ds_npu.topology.degrees import Axis
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.expert_elements import ExpertElements, why_not_moved
from ds_npu.zero_ext.method_wraps import MethodLevel
from ds_npu.zero_ext.training_engine import TrainingEngine

KEY = "ds_npu.moe.placement_interval"
PLACES = "ds_npu_expert_places"
"""The attribute of a module whose experts may move, and the key of what a checkpoint says of where they are."""
VIEW: tuple[Axis, ...] = ("edp", "ep", "etp")
"""The axes of the ranks that hold a layer's experts and their copies."""
State = dict[str, Any]


def modules_with_places(model: nn.Module) -> dict[str, tuple[nn.Module, PlacedExperts]]:
    """By name, the modules whose experts may move."""
    found = {}
    for name, module in model.named_modules():
        placed = attribute(module, PLACES, PlacedExperts)
        if placed is not None:
            found[name] = (module, placed)
    return found


class Relocation:
    """Moves the experts of ``engine``, which is complete; every rank makes and calls it at the same time.

    Raises ValueError where they cannot be moved.
    """

    def __init__(self, engine: TrainingEngine, interval: int) -> None:
        self._engine, self._interval = engine, interval
        self._topology = engine.topology
        self._layers = modules_with_places(engine.module)
        if reason := why_not_moved(engine) or (None if self._layers else "no experts were placed by ds_npu"):
            raise ValueError(f"{KEY}: found {interval}, but {reason}. What to do: that, or {KEY} 0")
        parameters = [each for module, _ in self._layers.values() for each in _weights(module)]
        self._elements = ExpertElements(engine, parameters, self._topology)
        self.sent_bytes = 0
        """What this rank has sent to others, of experts that moved."""

    def relocate_in_time(self) -> None:
        """Relocate, where the number of the optimizer step that has ended says so."""
        if self._engine.global_steps % self._interval == 0:
            self.relocate()

    @torch.no_grad()
    def relocate(self) -> None:
        """Move experts by what they were chosen since the last time, in every layer where it pays."""
        said, before_bytes = [], self.sent_bytes
        loads_of = summed_loads(self._engine.module, self._topology)
        for name, (module, placed) in self._layers.items():
            before, loads = placed.places, loads_of[name]
            after = places_by_load(loads, before)
            if after != before:
                self._move(module, before, after)
                mean = sum(loads) / len(before)
                said.append(f"{name} {heaviest(loads, before) / mean:.2f} -> {heaviest(loads, after) / mean:.2f}")
            placed.start_again(after)
        if said:
            self._elements.gather_again()
            sent = (self.sent_bytes - before_bytes) / 2**20
            text = "experts moved, the heaviest rank's load over the mean: %s; this rank sent %.1f MiB"
            logger().info(text, ", ".join(said), sent)

    def _move(self, module: nn.Module, before: Places, after: Places) -> None:
        moves, group = list(moves_between(before, after)), self._topology.group(*VIEW)
        for parameter in _weights(module):
            for held in self._elements.of(parameter):
                self.sent_bytes += exchange_experts(held, _size(parameter, before), moves, group)
            put_at(parameter, after)


def install_relocation(interval: int, engine: TrainingEngine) -> list[str]:
    """Move the experts of ``engine``, which is complete, behind each optimizer step whose number ``interval`` divides.

    Raises ValueError where they cannot be moved.
    """
    engine.events.after_step(MethodLevel.RELOCATION, Relocation(engine, interval).relocate_in_time)
    return []


def put_at(parameter: nn.Parameter, places: Places) -> None:
    """Record that the experts of the weight ``parameter`` are at ``places``."""
    placement = placement_of(parameter)
    sharded = {**placement.sharded, "ep": sharding_of_places(places)}
    set_placement(parameter, dataclasses.replace(placement, sharded=sharded))


def summed_loads(model: nn.Module, topology: Topology) -> dict[str, list[int]]:
    """By name of each layer whose experts may move, how often each was chosen by the tokens of all ranks."""
    layers = modules_with_places(model)
    if not layers:
        return {}
    device = next(model.parameters()).device
    loads = [placed.loads(device) for _, placed in layers.values()]
    flat = torch.cat(loads)
    dist.all_reduce(flat, group=topology.group(*VIEW))
    # The host waits for it, once in an interval: the plan is made there.
    summed = [each.tolist() for each in torch.split(flat, [len(each) for each in loads])]
    return dict(zip(layers, summed, strict=True))


def state_of_places(model: nn.Module, topology: Topology) -> State:
    """Where experts are and how often they were chosen since they moved, by layer; every rank calls it."""
    loads = summed_loads(model, topology)
    layers = modules_with_places(model)
    return {name: {"places": placed.places, "loads": loads[name]} for name, (_, placed) in layers.items()}


def restore_places(model: nn.Module, state: State | None, topology: Topology) -> None:
    """Take over what ``state_of_places`` wrote, before weights are loaded; None: experts are in the plain order.

    Raises ValueError where experts have moved and ``model`` has no map of them.
    """
    layers, known = modules_with_places(model), state or {}
    for name, found in known.items():
        places = tuple(map(tuple, found["places"]))
        if name not in layers and places != plain_places(sum(map(len, places)), len(places)):
            raise ValueError(
                f"{KEY}: found 0, but the checkpoint's experts of {name} were moved. What to do: the {KEY} of the run "
                "that wrote it; or weights only: engine.save_pretrained in that run, from_pretrained in this one"
            )
    is_first = topology.rank(*VIEW) == 0
    for name, (module, placed) in layers.items():
        plain = plain_places(placed.experts, len(placed.places))
        found = known.get(name, {"places": plain, "loads": []})
        places = tuple(map(tuple, found["places"]))
        # The sum of all ranks stands on one of them.
        placed.start_again(places, found["loads"] if is_first else [])
        for parameter in _weights(module):
            put_at(parameter, places)


def _weights(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of all experts of ``module``."""
    return [each for each in module.parameters(recurse=False) if placement_of(each).is_expert]


def _size(parameter: Any, places: Places) -> int:
    """The elements of one expert in ``parameter``, on this rank."""
    shape = unpartitioned_shape(parameter)
    assert shape[0] == len(places[0])
    return torch.Size(shape[1:]).numel()
