"""Protects the weight shards of a sharded model: nobody computes with a shard as if it were the whole weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import nn

from ds_npu.features.experts.expert_ranks import EXPERTS_INSTALLED
from ds_npu.features.tensor_parallel.sharded_model import SHARDED_MODEL
from ds_npu.models import names
from ds_npu.models.zero3 import unpartitioned_shape
from ds_npu.parallel.runtime.forward_wraps import Level, wrap_forward
from ds_npu.parallel.runtime.placement import placement_of, sharding_of
from ds_npu.parallel.tensor.shard_access import (
    GuardedParameter,
    Shard,
    ShardedParameter,
    WeightShard,
    model_forward_scope,
    protect,
)
from ds_npu.topology.topology import Topology

P = ParamSpec("P")
T = TypeVar("T")
EXPERT_REMEDY = (
    "call the module of the experts, whose forward reaches all of them; to save, call engine.save_pretrained(folder) "
    "or engine.whole_state_dict(). Or set ds_npu.parallel.expert and expert_tensor to 1"
)


def protect_shards(model: nn.Module, topology: Topology) -> bool:
    """Protect the weight shards of ``model``, if features have sharded it; returns whether it has protected ones.

    Within a forward of ``model``, reading a weight that tensor ranks share as a module's attribute gives the whole
    weight; experts are not gathered. Not protected are the shards of layers that a user put into a model, which know
    them, and experts that PEFT adapts and computes with.
    """
    if EXPERTS_INSTALLED.get(model):
        for name, parameter in model.named_parameters():
            placement = placement_of(parameter)
            if placement.is_expert and not names.is_adapted(name):
                axes = " and ".join(f"dim {each.dim} over {axis}" for axis, each in placement.sharded.items())
                protect(parameter, Shard(f"{name} is sharded: {axes} (ds_npu.parallel.expert)", EXPERT_REMEDY))
    if SHARDED_MODEL.get(model) is not None:
        for name, parameter in model.named_parameters():
            sharding = sharding_of(parameter)
            if sharding is not None:
                shape = list(unpartitioned_shape(parameter))
                shape[sharding.dim] = sharding.size
                protect(parameter, WeightShard.of(names.plain(name), shape, sharding, topology.group("tp")))
    protected = {type(parameter) for parameter in model.parameters()} & {ShardedParameter, GuardedParameter}
    if ShardedParameter in protected:
        wrap_forward(model, _in_forward, Level.MODEL)
    return bool(protected)


def _in_forward(forward: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    with model_forward_scope():
        return forward(*args, **kwargs)
