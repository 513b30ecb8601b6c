"""The parts of each weight of a layer of linear attention that a tensor rank has: whole heads, with what they share.

A gated delta net is divided between heads of keys, each with the heads of values that share it; Mamba 2 between groups
of heads, which share B and C.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from torch import nn

from ds_npu.config.roles import Role
from ds_npu.features.declaration import Change
from ds_npu.features.tensor_parallel.regions import wrap
from ds_npu.features.tensor_parallel.role_shards import RoleShards
from ds_npu.models import kinds
from ds_npu.models.attributes import attribute, set_attribute
from ds_npu.models.linear_attention import LinearAttention, linear_attention_of
from ds_npu.models.plan import ModelPlan
from ds_npu.parallel.runtime.forward_wraps import Level, P, R, wrap_forward
from ds_npu.parallel.tensor.axis import TensorAxis
from ds_npu.parallel.tensor.shard_access import allow_shard_access
from ds_npu.parallel.tensor.sharding import Sharding, near_even

Sections = tuple[int, ...]
"""Widths for each head of keys (or group) of what a weight holds one behind the other."""
UNITS = {LinearAttention.GATED_DELTA: "num_k_heads", LinearAttention.MAMBA_2: "n_groups"}
"""The attribute of a layer that counts what is divided."""
COUNTS = {
    LinearAttention.GATED_DELTA: ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"),
    LinearAttention.MAMBA_2: ("n_groups", "num_heads", "intermediate_size", "conv_dim"),
}
"""The attributes of a layer that are those of a rank's heads."""


def sections_of(layer: nn.Module) -> Mapping[str, Sections]:
    """The sections of each weight of ``layer`` that is sharded, by the name of the module or parameter that has it."""
    count = units(layer)
    if linear_attention_of(layer) is LinearAttention.GATED_DELTA:
        key, shared = _number(layer, "head_k_dim"), _number(layer, "num_v_heads") // count
        value = shared * _number(layer, "head_v_dim")
        return {
            # Here what a head of keys needs stands together.
            "in_proj_qkvz": (2 * key + 2 * value,),
            "in_proj_ba": (2 * shared,),
            "in_proj_qkv": (key, key, value),
            "in_proj_z": (value,),
            "in_proj_b": (shared,),
            "in_proj_a": (shared,),
            "conv1d": (key, key, value),
            "A_log": (shared,),
            "dt_bias": (shared,),
            "out_proj": (value,),
        }
    heads, state = _number(layer, "num_heads") // count, _number(layer, "ssm_state_size")
    inner = heads * _number(layer, "head_dim")
    return {
        "in_proj": (inner, inner, state, state, heads),
        "conv1d": (inner, state, state),
        **dict.fromkeys(("A_log", "dt_bias", "D"), (heads,)),
        **dict.fromkeys(("norm", "out_proj"), (inner,)),
    }


def units(layer: nn.Module) -> int:
    """The heads of keys, or groups of heads, of ``layer``."""
    kind = linear_attention_of(layer)
    assert kind is not None, "the role of linear attention is for such a layer"
    return _number(layer, UNITS[kind])


def shards_of(sections: Sections, count: int, size: int) -> RoleShards:
    """The shards over ``size`` ranks of a weight with ``sections`` for each of ``count`` units."""
    starts = [0, *itertools.accumulate(width * count for width in sections)]
    ranges = [
        tuple((start + a * width, start + b * width) for start, width in zip(starts, sections, strict=False))
        for a, b in near_even(count, size)
    ]
    return RoleShards(starts[-1], tuple(ranges))


def local_counts(layer: nn.Module, size: int, rank: int) -> dict[str, int]:
    """The attributes of ``layer`` that count what it computes, for ``rank`` of ``size``."""
    count, kind = units(layer), linear_attention_of(layer)
    assert kind is not None, "the role of linear attention is for such a layer"
    begin, end = near_even(count, size)[rank]
    return {name: _number(layer, name) // count * (end - begin) for name in COUNTS[kind]}


def check_layers(model: str, layers: Mapping[str, nn.Module], size: int) -> None:
    """Raise ValueError that names every one of ``layers`` that has fewer heads than there are ranks."""
    told = [
        f"  {name} ({type(layer).__name__}): {units(layer)}" for name, layer in layers.items() if units(layer) < size
    ]
    if told:
        raise ValueError(
            f"ds_npu.parallel.tensor: found {size}; each tensor rank needs a head of keys, or (Mamba 2) a group of "
            f"heads that share B and C, of which layers of {model} have fewer:\n" + "\n".join(told) + "\n"
            "What to do: fewer ranks, or give them the role replicated in ds_npu.plan"
        )


def linear_attention_shards(plan: ModelPlan, modules: Mapping[str, nn.Module], size: int) -> dict[str, RoleShards]:
    """The shards of the linears of linear attention; raises ValueError for layers with fewer heads than ranks."""
    layers = {name: modules[name] for name in plan.named(Role.LINEAR_ATTENTION)}
    check_layers(plan.model, layers, size)
    return {
        f"{name}.{part}": shards_of(sections, units(layer), size)
        for name, layer in layers.items()
        for part, sections in sections_of(layer).items()
        if plan.of(f"{name}.{part}") in (Role.LINEAR_ATTENTION_INPUT, Role.LINEAR_ATTENTION_OUTPUT)
    }


def own_shards(name: str, layer: nn.Module, size: int) -> Iterator[tuple[str, str, Sharding]]:
    """Module, parameter and sharding of all that a layer shards but its linears."""
    wanted = sections_of(layer)
    for part in ("", "conv1d", "norm"):
        for leaf in kinds.own_shapes(layer.get_submodule(part)):
            if sections := wanted.get(part or leaf):
                yield f"{name}.{part}".removesuffix("."), leaf, shards_of(sections, units(layer), size).sharding(0)


def by_heads(name: str, layer: nn.Module, axis: TensorAxis) -> Iterator[Change]:
    """Make the layer ``name`` count the heads of this rank, and compute with shards."""
    for key, count in local_counts(layer, axis.size, axis.rank).items():
        yield Change("sets", name, key, partial(set_attribute, layer, key, count))
    yield wrap(name, "computes with shards of its weights", partial(wrap_forward, layer, with_shards, Level.REGION))


def with_shards(forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """A wrap of a layer, whose own code computes with the shards of its weights."""
    with allow_shard_access():
        return forward(*args, **kwargs)


def _number(layer: nn.Module, name: str) -> int:
    found = attribute(layer, name, int)
    assert found is not None, f"transformers' {type(layer).__name__} has {name}"
    return found
