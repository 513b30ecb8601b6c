"""The placement of each weight of the plain model: one record per parameter, from which DeepSpeed's settings derive.

The words are DTensor's. Along each axis of the grid a parameter is *sharded* (every rank holds other ranges of the
weight), *replicated* (the ranks hold the same values) or *absent* elsewhere (the other ranks do not hold it at all: the
layers of another pipeline stage). Weights of experts use the expert view of the grid, all others the dense view
(``ds_npu.topology.degrees``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute
from ds_npu.parallel.tensor.sharding import Sharding
from ds_npu.topology.degrees import DENSE, EXPERT, Axis

Part = Sharding | Literal["replicated", "absent"]
"""The part of a weight that a rank holds along one axis."""

DATA_AXES: tuple[Axis, ...] = ("dp", "cp", "edp")
"""Axes whose ranks train the same weights on other tokens: gradients are reduced and ZeRO shards over them."""


@dataclass(frozen=True)
class Placement:
    """The ranks that hold one parameter's weight, and the axes over which its gradient is summed."""

    name: str = ""
    """The name and, below, the shape in the plain model; empty until an engine is made."""
    shape: tuple[int, ...] = ()
    is_expert: bool = False
    sharded: Mapping[Axis, Sharding] = field(default_factory=dict)
    absent: frozenset[Axis] = frozenset()
    """Axes along which the other ranks do not have the weight."""
    partial: frozenset[Axis] = frozenset()
    """Axes, other than data axes, over which gradients are summed as soon as they are computed (``sum_gradient``)."""

    @property
    def view(self) -> tuple[Axis, ...]:
        return EXPERT if self.is_expert else DENSE

    @property
    def data_axes(self) -> tuple[Axis, ...]:
        """The axes of its view over which its gradient is reduced and ZeRO shards it."""
        return tuple(axis for axis in self.view if axis in DATA_AXES)

    def part(self, axis: Axis) -> Part:
        """The part that a rank holds along ``axis`` of the view; data axes replicate (before ZeRO)."""
        if axis in self.sharded:
            return self.sharded[axis]
        return "absent" if axis in self.absent else "replicated"

    @property
    def copied(self) -> tuple[Axis, ...]:
        """The axes of the view, other than data axes, whose ranks hold the same values."""
        return tuple(axis for axis in self.view if axis not in DATA_AXES and self.part(axis) == "replicated")

    def counts_at(self, ranks: Mapping[Axis, int], axes: tuple[Axis, ...]) -> bool:
        """Whether the rank with these ``ranks`` is the first of those along ``axes`` that hold the same values."""
        return all(ranks[axis] == 0 for axis in self.copied if axis in axes)


_PLACEMENT = TensorAttribute[Placement]("ds_npu_placement")


def placement_of(parameter: nn.Parameter) -> Placement:
    """The record of ``parameter``; without one the parameter is whole on every rank."""
    return _PLACEMENT.get(parameter) or Placement()


def has_experts(model: nn.Module) -> bool:
    """Whether ``model`` has weights on the expert view."""
    return any(placement_of(parameter).is_expert for parameter in model.parameters())


def set_placement(parameter: nn.Parameter, placement: Placement) -> None:
    """Replace the record of ``parameter``."""
    _PLACEMENT.set(parameter, placement)


def sharding_of(parameter: nn.Parameter) -> Sharding | None:
    """How ``parameter`` is sharded over the tensor ranks; None where it is whole."""
    return placement_of(parameter).sharded.get("tp")


def mark_sharded(parameter: nn.Parameter, sharding: Sharding, axis: Axis = "tp") -> None:
    """Record that ``parameter`` is this rank's shard along ``axis``; "ep" and "etp" make it an expert's."""
    before = placement_of(parameter)
    sharded = {**before.sharded, axis: sharding}
    set_placement(parameter, dataclasses.replace(before, sharded=sharded, is_expert=axis not in DENSE))


def mark_partial(parameter: nn.Parameter, axis: Axis) -> None:
    """Record that gradients of ``parameter`` are summed over ``axis`` as soon as they are computed."""
    before = placement_of(parameter)
    set_placement(parameter, dataclasses.replace(before, partial=before.partial | {axis}))


def keep_shard(parameter: nn.Parameter, sharding: Sharding, rank: int) -> None:
    """Reduce ``parameter``, which holds the whole weight, to the shard of tensor rank ``rank``, in place.

    A parameter of two modules (a tied one) is sharded once. Raises ValueError where they want it sharded differently.
    """
    already = sharding_of(parameter)
    if already == sharding:
        return
    if already is not None:
        raise ValueError(f"a weight that two modules share is to be sharded as {already} and as {sharding}")
    parameter.data = sharding.take(parameter.data, rank)
    mark_sharded(parameter, sharding)


def keep_expert_shard(parameter: nn.Parameter, shardings: Mapping[Axis, Sharding], ranks: Mapping[Axis, int]) -> None:
    """Reduce ``parameter``, whole experts' weights, to this rank's shard along axes of the expert view, in place.

    ``ranks``: this rank's rank along each of these axes.
    """
    for axis, sharding in shardings.items():
        parameter.data = sharding.take(parameter.data, ranks[axis])
        mark_sharded(parameter, sharding, axis)
