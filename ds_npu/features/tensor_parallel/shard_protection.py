"""Protects the weight shards of a sharded model: nobody computes with a shard as if it were the whole weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import nn

from ds_npu.features.tensor_parallel.sharded_model import SHARDED_ATTRIBUTE
from ds_npu.models import names
from ds_npu.models.attributes import has_attribute
from ds_npu.models.zero3 import unpartitioned_shape
from ds_npu.parallel.forward_wraps import Level, wrap_forward
from ds_npu.parallel.placement import sharding_of
from ds_npu.parallel.tensor.shard_access import ShardedParameter, WeightShard, model_forward_scope, protect
from ds_npu.topology.topology import Topology

P = ParamSpec("P")
T = TypeVar("T")


def protect_shards(model: nn.Module, topology: Topology) -> bool:
    """Protect the weight shards of ``model``, if ``shard_model`` has sharded it; returns whether it has protected ones.

    Whoever reads a sharded weight as a module's attribute within a forward of ``model`` gets the whole weight. Parallel
    layers that a user put into a model know their own shards, which are not protected.
    """
    if has_attribute(model, SHARDED_ATTRIBUTE):
        for name, parameter in model.named_parameters():
            sharding = sharding_of(parameter)
            if sharding is not None:
                shape = list(unpartitioned_shape(parameter))
                shape[sharding.dim] = sharding.size
                protect(parameter, WeightShard.of(names.plain(name), shape, sharding, topology.group("tp")))
    protected = any(isinstance(parameter, ShardedParameter) for parameter in model.parameters())
    if protected:
        wrap_forward(model, _in_forward, Level.MODEL)
    return protected


def _in_forward(forward: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    with model_forward_scope():
        return forward(*args, **kwargs)
