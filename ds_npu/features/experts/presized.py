"""``ds_npu.moe.row_margin``: layers send in buffers as large as earlier forwards needed, and wait for no host.

The host learns at the end of a forward in training whether all rows fitted; where they did not, on any rank, all ranks
compute the forward again with exact sizes, before anything of it is seen outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_npu.comm.collectives import all_reduce
from ds_npu.comm.host_copy import HostCopy, copy_to_device
from ds_npu.comm.pending import Pending
from ds_npu.features.declaration import Change
from ds_npu.features.experts.routing import forget_collected
from ds_npu.features.modules.closing_checkpoint import recompute_in_micro_batch
from ds_npu.log import logger
from ds_npu.models import names
from ds_npu.models.zero3 import is_partitioned
from ds_npu.parallel.expert.dispatch import AllToAllPlan, Plan
from ds_npu.parallel.expert.presized import PresizedPlan, Room, need
from ds_npu.parallel.expert.replay import WATCHED
from ds_npu.parallel.runtime.forward_wraps import Forward, Level, wrap_forward
from ds_npu.parallel.runtime.micro_batch import Fact, new_forward, running
from ds_npu.parallel.tensor.randomness import generator_states, restore_generators
from ds_npu.topology.topology import Topology

KEY = "ds_npu.moe.row_margin"
FORWARDS = 64
"""After so many, rooms are made anew by what the last of them needed, so that they may become smaller."""

Piece = tuple[str, int]
"""The name of a layer's experts, and which piece of its tokens."""
Needs = dict[Piece, list[Pending[torch.Tensor]]]
"""Of each call of a layer in one forward."""

_ROOMS: Fact[Mapping[Piece, Room]] = Fact()
"""Of the forward that runs, and where a part of it is computed again; sizes of a piece without one are exact."""
_NEEDS: Fact[Needs] = Fact(while_running=True)


class PresizedForward:
    """Wraps the forward of a model: its layers of experts compute in rooms, or it runs again without them."""

    def __init__(self, model: nn.Module, layers: Sequence[str], margin: float, topology: Topology) -> None:
        self._model, self._margin, self._topology = model, margin, topology
        self._blocks = [model.get_submodule(names.owner(name)) for name in layers]
        self._rooms: dict[Piece, Room] = {}
        self._on_device: dict[Piece, torch.Tensor] = {}
        """The numbers of each room."""
        self._largest: dict[Piece, torch.Tensor] = {}
        """What was needed since rooms were last made anew."""
        self.forwards = 0
        self.repeated = 0
        """Of them, those that were computed again."""

    def plans(self, name: str, plans: Sequence[AllToAllPlan]) -> Sequence[Plan]:
        """``ExpertOptions.presize`` of the experts ``name``."""
        rooms, needs = _ROOMS.of(running()), _NEEDS.of(running())
        if rooms is None:
            if torch._C._current_graph_task_id() != -1:
                raise RuntimeError(
                    f"{KEY}: {name} is computed again in backward by activation checkpointing that ds_npu does not "
                    "know, and its sizes are not known there. What to do: transformers' gradient checkpointing or "
                    f"ds_npu.recompute; or leave {KEY} out"
                )
            return plans
        made: list[Plan] = []
        for index, plan in enumerate(plans):
            if needs is not None:
                needs.setdefault((name, index), []).append(need(plan))
            room = rooms.get((name, index))
            made.append(plan if room is None else PresizedPlan(plan, room))
        return made

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if not (self._model.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        # Who records or replays choices is to see each of them once.
        is_watched = any(getattr(block, WATCHED, False) for block in self._blocks)
        rooms = {} if is_watched else dict(self._rooms)
        kind = self._device.type
        states = generator_states(kind)
        out, fits = self._run(rooms, forward, *args, **kwargs)
        if fits:
            return out
        del out  # With its graph.
        self.repeated += 1
        logger().info("%s: rows did not fit, and a forward was computed again (%d of %d)", KEY, *self._counted)
        forget_collected()
        restore_generators(kind, states)
        out, _ = self._run({}, forward, *args, **kwargs)
        return out

    @property
    def _counted(self) -> tuple[int, int]:
        return self.repeated, self.forwards

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _run(self, rooms: Mapping[Piece, Room], forward: Forward, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
        """The result, and whether all rows of all ranks at work fitted."""
        needs: Needs = {}
        with new_forward() as micro_batch:
            _ROOMS.set(micro_batch, rooms)
            _NEEDS.set(micro_batch, needs)
            out = forward(*args, **kwargs)
        return out, not needs or self._fits(rooms, needs)

    def _fits(self, rooms: Mapping[Piece, Room], needs: Needs) -> bool:
        of_calls = {piece: torch.stack([each.wait() for each in calls]) for piece, calls in needs.items()}
        needed = {piece: each.amax(0) for piece, each in of_calls.items()}
        given = [self._on_device[piece] if piece in rooms else each for piece, each in needed.items()]
        flat = torch.cat(list(needed.values()))
        beyond = (flat > torch.cat(given)).any().to(flat.dtype).view(1)
        for group in self._groups:
            beyond = all_reduce(beyond, group).wait()
        # The one wait of a forward: its result must not be seen before it is known to be right.
        numbers = HostCopy(torch.cat([beyond, flat])).read()
        found = torch.split(numbers[1:], [len(each) for each in needed.values()])
        for piece, each in zip(needed, found, strict=True):
            self._largest[piece] = torch.maximum(each, self._largest.get(piece, each))
        fits, self.forwards = not numbers[0], self.forwards + 1
        if self.forwards % FORWARDS == 0:
            self._make_rooms()
            self._largest = {}
        elif needed.keys() - rooms.keys():
            self._make_rooms()
        return fits

    def _make_rooms(self) -> None:
        between_ranks = self._topology.size("ep", "etp") ** 2
        for piece, largest in self._largest.items():
            rows, pairs = largest[:between_ranks].double(), largest[between_ranks:].double()
            # Two ranks that had little for each other may have as much as any other two.
            even = torch.cat([each.clamp(min=each.mean()) for each in (rows, pairs)])
            numbers = (even * self._margin).ceil().long()
            self._rooms[piece] = Room(numbers)
            self._on_device[piece] = copy_to_device(numbers, self._device)

    @cached_property
    def _groups(self) -> list[dist.ProcessGroup]:
        """Over which the ranks that work together in a forward learn of each other's rows, one after the other.

        The ranks of an expert axis know the same already.
        """
        topology = self._topology
        experts, dense = topology.size("ep", "etp"), topology.size("cp") * topology.size("tp")
        axes: list[tuple[Any, ...]] = [("tp",), ("cp",)]
        is_nested = experts % dense == 0 or dense % experts == 0
        # Gathers of ZeRO 3 are over all.
        if not is_nested or any(is_partitioned(each) for each in self._model.parameters()):
            axes.append(("dp", "cp"))
        return [topology.group(*each) for each in axes if topology.size(*each) > 1]


def presized_changes(model: nn.Module, layers: Sequence[str], forward: PresizedForward) -> Iterator[Change]:
    """What makes ``model`` run by ``forward``, and its blocks in the same rooms where they are computed again."""
    make = partial(wrap_forward, model, forward, Level.MODEL)
    yield Change("wraps", "", "runs in rooms, or again", make, Level.MODEL)
    for name, module in model.named_modules():
        around = any(layer.startswith(f"{name}.") for layer in layers)
        if name and around and hasattr(module, "gradient_checkpointing"):
            make = partial(recompute_in_micro_batch, module)
            yield Change("wraps", name, "computed again in the same rooms", make, Level.RECOMPUTE)
