"""Lets nobody take one tensor rank's shard of a sharded model's weight for the whole of it."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_npu.features.tensor_parallel.sharded_model import SHARDED_ATTRIBUTE
from ds_npu.models import names
from ds_npu.parallel.forward_wraps import wrap_forward
from ds_npu.parallel.tensor.shard_access import ShardedParameter, WeightShard, model_forward_scope, protect
from ds_npu.parallel.tensor.sharding import sharding_of
from ds_npu.topology.topology import Topology


def protect_shards(model: nn.Module, topology: Topology) -> bool:
    """Protect the shards of ``model``, if ds_npu has sharded it; whether there are any.

    A model that is made of parallel layers knows its own, which are not protected. Whoever reads a sharded weight as a
    module's attribute within a forward of ``model`` gets the whole.
    """
    if SHARDED_ATTRIBUTE in vars(model):
        for name, parameter in model.named_parameters():
            sharding = sharding_of(parameter)
            if sharding is not None:
                shape = list(vars(parameter).get("ds_shape", parameter.shape))  # Under ZeRO-3 it holds nothing now.
                shape[sharding.dim] = sharding.size
                protect(parameter, WeightShard.of(names.plain(name), shape, sharding, topology.group("tp")))
    protected = any(isinstance(parameter, ShardedParameter) for parameter in model.parameters())
    if protected:
        wrap_forward(model, _together)
    return protected


def _together(forward: Any, *args: Any, **kwargs: Any) -> Any:
    with model_forward_scope():
        return forward(*args, **kwargs)
