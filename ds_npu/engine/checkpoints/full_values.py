"""DeepSpeed's ``safe_get_full_*`` and ``safe_set_full_*`` for weights that ds_npu shards: of the whole weight.

DeepSpeed (0.19.8, utils/tensor_fragment.py) puts together what ZeRO has partitioned, which on a tensor or expert rank
is that rank's shard. Here the shards of all ranks along the axes that shard a weight are gathered, too; of a value to
be set, each rank takes its shard. As with ZeRO 3 in DeepSpeed, all ranks call these functions for the same weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_npu.parallel.runtime.placement import placement_of
from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute
from ds_npu.parallel.tensor.shard_access import allow_shard_access, local_shard
from ds_npu.parallel.tensor.whole_weight import gather_shards
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.method_wraps import MethodLevel, wrap_method

Function = Callable[..., Any]
LINK = "_lazy_init_hp_params_optimizer_state"


@dataclass(frozen=True)
class Grid:
    """The ranks over which a sharded weight is gathered."""

    topology: Topology

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # A weight that is read from a file has no grid.


GRID = TensorAttribute[Grid]("ds_npu_grid")


def know_grid(model: nn.Module, topology: Topology) -> None:
    """Note on each sharded weight of ``model`` the topology over whose ranks it is gathered."""
    for weight in model.parameters():
        if placement_of(weight).sharded:
            GRID.set(weight, Grid(topology))


def getting_full(original: Function) -> Function:
    """Replace a function that returns a value of a weight's shape, or None; the whole weight's is returned."""

    @functools.wraps(original)
    def get(param: nn.Parameter, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        found = original(param, *args, **kwargs)
        return found if found is None or not _is_sharded(param) else whole_of(param, found)

    return get


def setting_full(original: Function) -> Function:
    """Replace a function that sets a value of a weight's shape; the value given is the whole weight's."""

    @functools.wraps(original)
    def set_value(param: nn.Parameter, value: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        original(param, own_part(param, value) if _is_sharded(param) else value, *args, **kwargs)

    return set_value


def updating_full(original: Function) -> Function:
    """Replace a function that applies ``update_func`` to the gradient of each weight.

    It gets whole gradients.
    """

    @functools.wraps(original)
    def update(param_list: list[nn.Parameter], update_func: Function) -> None:
        def updated(gradient: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
            is_sharded = _is_sharded(param)
            found: torch.Tensor = update_func(whole_of(param, gradient) if is_sharded else gradient, param)
            return own_part(param, found) if is_sharded else found

        original(param_list, updated)

    return update


def link_every_group(optimizer: Any) -> None:
    """Let ZeRO 1 and 2 link the weights of every parameter group to their optimizer state.

    DeepSpeed does so once, when the first of several groups has been stepped and the others have no state.
    """
    groups = getattr(optimizer, "single_partition_of_fp32_groups", ())
    if len(groups) < 2 or not hasattr(optimizer, LINK):
        return

    def link(original: Function) -> None:
        original()
        has_state = [bool(optimizer.optimizer.state.get(each)) for each in groups]
        optimizer._hp_optimizer_states_linked = all(has_state) or not any(has_state)
        if all(has_state):
            undo()

    undo = wrap_method(optimizer, LINK, link, MethodLevel.CORRECTION)


def whole_of(param: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """Gather the whole value of which ``part`` is this rank's shard, sharded as ``param`` is."""
    topology = _grid(param)
    with allow_shard_access(), torch.no_grad():
        whole = local_shard(part)
        for axis, sharding in list(placement_of(param).sharded.items())[::-1]:
            whole = gather_shards(whole, sharding, topology.group(axis))
    return whole


def own_part(param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """This rank's shard of ``value``, which has the shape of the whole weight. Raises ValueError for other shapes."""
    placement, topology = placement_of(param), _grid(param)
    if tuple(value.shape) != placement.shape:
        raise ValueError(
            f"{placement.name}: found a value of shape {list(value.shape)}; the whole weight has "
            f"{list(placement.shape)}. What to do: give the whole on every rank, as safe_get_full_* returns it"
        )
    for axis, sharding in placement.sharded.items():
        value = sharding.take(value, topology.rank(axis))
    return value


def _is_sharded(param: nn.Parameter) -> bool:
    return GRID.get(param) is not None


def _grid(param: nn.Parameter) -> Topology:
    """Raises ValueError for a weight that one rank has whole and the others not at all."""
    placement, grid = placement_of(param), GRID.get(param)
    assert grid is not None
    if any(not each.length(rank) for each in placement.sharded.values() for rank in range(len(each.ranges))):
        raise ValueError(
            f"{placement.name}: one expert rank has all of it, so no rank can be given the whole. What to do: read it "
            "with engine.whole_weights(), or set ds_npu.parallel.expert to 1"
        )
    return grid.topology
