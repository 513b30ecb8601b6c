"""``ds_npu.moe.row_margin``: layers send in buffers of sizes that earlier forwards needed; no layer waits for the host.

The host learns at the end of a forward in training whether all rows fitted. Where they did not, on any rank, all ranks
compute the forward again with exact sizes before they return its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial

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
from ds_npu.parallel.expert.presized import BufferSizes, PresizedPlan, need
from ds_npu.parallel.expert.replay import WATCHED
from ds_npu.parallel.runtime.forward_wraps import Level, P, R, wrap_forward
from ds_npu.parallel.runtime.micro_batch import Fact, is_in_backward, new_forward, running
from ds_npu.parallel.tensor.randomness import generator_states, restore_generators
from ds_npu.topology.degrees import Axis
from ds_npu.topology.topology import Topology

KEY = "ds_npu.moe.row_margin"
FORWARDS = 64
"""The number of forwards after which sizes follow the need of these forwards alone, and so may shrink."""

Piece = tuple[str, int]
"""The name of a layer's experts, and the index of a piece of its tokens."""
Needs = dict[Piece, list[Pending[torch.Tensor]]]
"""The buffer sizes that each call of a piece has needed in one forward."""

_SIZES: Fact[Mapping[Piece, BufferSizes]] = Fact()
"""The buffer sizes of the running forward and of its recomputation; a piece without them has exact sizes."""
_NEEDS: Fact[Needs] = Fact(while_running=True)


class PresizedForward:
    """Wraps the forward of a model: it runs with given buffer sizes, and again with exact ones if rows did not fit."""

    def __init__(self, model: nn.Module, layers: Sequence[str], margin: float, topology: Topology) -> None:
        self._model, self._margin, self._topology = model, margin, topology
        self._blocks = [model.get_submodule(names.owner(name)) for name in layers]
        self._sizes: dict[Piece, BufferSizes] = {}
        self._on_device: dict[Piece, torch.Tensor] = {}
        self._largest: dict[Piece, torch.Tensor] = {}
        """The largest needs in the current ``FORWARDS`` forwards."""
        self.forwards = 0
        self.repeated = 0

    def plans(self, name: str, plans: Sequence[AllToAllPlan]) -> Sequence[Plan]:
        """Give the ``plans`` of the experts ``name`` the forward's buffer sizes.

        The sizes that they need are noted. This is ``ExpertOptions.presize`` of these experts.
        """
        sizes = _SIZES.of(running())
        needs = _NEEDS.of(running())
        if sizes is None:
            if is_in_backward():
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
            found = sizes.get((name, index))
            made.append(plan if found is None else PresizedPlan(plan, found))
        return made

    def __call__(self, forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if not (self._model.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        # A record or replay must see each choice once.
        is_watched = any(map(WATCHED.get, self._blocks))
        sizes = {} if is_watched else dict(self._sizes)
        kind = self._device.type
        states = generator_states(kind)
        out, fits = self._run(sizes, forward, *args, **kwargs)
        if fits:
            return out
        del out  # Frees its graph, too.
        self.repeated += 1
        logger().info(
            "%s: rows did not fit, and a forward was computed again (%d of %d)", KEY, self.repeated, self.forwards
        )
        forget_collected()
        restore_generators(kind, states)
        out, _ = self._run({}, forward, *args, **kwargs)
        return out

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _run(
        self, sizes: Mapping[Piece, BufferSizes], forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[R, bool]:
        """The result, and whether all rows fitted on all ranks that work on this forward."""
        needs: Needs = {}
        with new_forward() as micro_batch:
            _SIZES.set(micro_batch, sizes)
            _NEEDS.set(micro_batch, needs)
            out = forward(*args, **kwargs)
        return out, not needs or self._fits(sizes, needs)

    def _fits(self, sizes: Mapping[Piece, BufferSizes], needs: Needs) -> bool:
        of_calls = {piece: torch.stack([each.wait() for each in calls]) for piece, calls in needs.items()}
        needed = {piece: each.amax(0) for piece, each in of_calls.items()}
        given = [self._on_device[piece] if piece in sizes else each for piece, each in needed.items()]
        flat = torch.cat(list(needed.values()))
        beyond = (flat > torch.cat(given)).any().to(flat.dtype).view(1)
        for group in self._groups:
            beyond = all_reduce(beyond, group).wait()
        # The one wait of a forward: its result is returned only if it is right.
        numbers = HostCopy(torch.cat([beyond, flat])).read()
        found = torch.split(numbers[1:], [len(each) for each in needed.values()])
        for piece, each in zip(needed, found, strict=True):
            self._largest[piece] = torch.maximum(each, self._largest.get(piece, each))
        fits = not numbers[0]
        self.forwards = self.forwards + 1
        if self.forwards % FORWARDS == 0:
            self._resize()
            self._largest = {}
        elif needed.keys() - sizes.keys():
            self._resize()
        return fits

    def _resize(self) -> None:
        between_ranks = self._topology.size("ep", "etp") ** 2
        for piece, largest in self._largest.items():
            rows = largest[:between_ranks].double()
            pairs = largest[between_ranks:].double()
            # Two ranks that exchanged few rows may later exchange as many as any other two.
            even = torch.cat([each.clamp(min=each.mean()) for each in (rows, pairs)])
            numbers = (even * self._margin).ceil().long()
            self._sizes[piece] = BufferSizes(numbers)
            self._on_device[piece] = copy_to_device(numbers, self._device)

    @cached_property
    def _groups(self) -> list[dist.ProcessGroup]:
        """The groups of the all-reduces, one after the other, that tell all ranks of a forward whether rows fitted.

        The ranks of an expert axis know the same already.
        """
        topology = self._topology
        experts = topology.size("ep", "etp")
        dense = topology.size("cp") * topology.size("tp")
        axes: list[tuple[Axis, ...]] = [("tp",), ("cp",)]
        is_nested = experts % dense == 0 or dense % experts == 0
        # ZeRO 3 gathers over all ranks.
        if not is_nested or any(is_partitioned(each) for each in self._model.parameters()):
            axes.append(("dp", "cp"))
        return [topology.group(*each) for each in axes if topology.size(*each) > 1]


def presized_changes(model: nn.Module, layers: Sequence[str], forward: PresizedForward) -> Iterator[Change]:
    """Make ``model`` run by ``forward``, and recompute its blocks with the same buffer sizes."""
    make = partial(wrap_forward, model, forward, Level.MODEL)
    yield Change("wraps", "", "runs in rooms, or again", make, Level.MODEL)
    for name, module in model.named_modules():
        around = any(layer.startswith(f"{name}.") for layer in layers)
        if name and around and hasattr(module, "gradient_checkpointing"):
            make = partial(recompute_in_micro_batch, module)
            yield Change("wraps", name, "computed again in the same rooms", make, Level.RECOMPUTE)
