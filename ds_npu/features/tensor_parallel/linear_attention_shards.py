"""The parts of each weight of a layer of linear attention that a tensor rank has: whole heads, with what they share.

A gated delta net is divided between heads of keys, each with the heads of values that share it; Mamba 2 between groups
of heads, which share B and C, or inside of these groups (``shared_states``); Mamba and short convolutions between
channels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import nn

from ds_npu.comm.crossing import copy, reduce
from ds_npu.config.roles import Role
from ds_npu.features.declaration import Change
from ds_npu.features.tensor_parallel.regions import wrap
from ds_npu.features.tensor_parallel.role_shards import RoleShards
from ds_npu.features.tensor_parallel.shared_states import shared_states_of, why_not_shared
from ds_npu.models import kinds, names
from ds_npu.models.attributes import attribute, attributes, set_attribute
from ds_npu.models.linear_attention import CONVOLUTIONS, NORMS, LinearAttention, linear_attention_of, part_of
from ds_npu.models.plan import ModelPlan
from ds_npu.parallel.runtime.forward_wraps import Level, P, R, wrap_forward
from ds_npu.parallel.tensor.axis import TensorAxis
from ds_npu.parallel.tensor.shard_access import allow_shard_access
from ds_npu.parallel.tensor.sharding import Ranges, Sharding, near_even

Sections = tuple[int, ...]
"""The widths of the sections that a weight holds one behind the other, for one head of keys, group or channel."""
SUMMED = "x_proj"
"""Mamba's linear from all channels to B, C and the step."""
COUNTS = {
    LinearAttention.GATED_DELTA: ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"),
    LinearAttention.MAMBA: ("intermediate_size",),
    LinearAttention.MAMBA_2: ("n_groups", "num_heads", "intermediate_size", "conv_dim"),
    LinearAttention.SHORT_CONVOLUTION: (),
}
"""The attributes of a layer that are reduced to the heads, groups or channels of a rank."""


def sections_of(layer: nn.Module, size: int) -> Mapping[str, Sections]:
    """The sections of each weight of ``layer`` that is sharded, by the name of the module or parameter that has it."""
    count = units(layer, size)
    kind = linear_attention_of(layer)
    if kind is LinearAttention.SHORT_CONVOLUTION:
        return {"in_proj": (1, 1, 1), **dict.fromkeys(("conv", "conv1d", "out_proj"), (1,))}
    if kind is LinearAttention.MAMBA:
        return {"in_proj": (1, 1), **dict.fromkeys(("conv1d", "x_proj", "dt_proj", "A_log", "D", "out_proj"), (1,))}
    if kind is LinearAttention.GATED_DELTA:
        key = _number(layer, "head_k_dim")
        shared = _number(layer, "num_v_heads") // count
        value = shared * _number(layer, "head_v_dim")
        return {
            # In these weights, the outputs for a head of keys are adjacent.
            "in_proj_qkvz": (2 * key + 2 * value,),
            "in_proj_ba": (2 * shared,),
            **dict.fromkeys(("in_proj_qkv", "conv1d"), (key, key, value)),
            **dict.fromkeys(("q_proj", "k_proj"), (key,)),
            **dict.fromkeys(("in_proj_z", "v_proj", "g_proj", "out_proj", "o_proj"), (value,)),
            **dict.fromkeys(("in_proj_b", "in_proj_a", "b_proj", "a_proj", "A_log", "dt_bias"), (shared,)),
        }
    heads = _number(layer, "num_heads") // count
    groups = _number(layer, "n_groups")
    inner = heads * _number(layer, "head_dim")
    state = groups * _number(layer, "ssm_state_size") // count
    return {
        "in_proj": (inner, inner, state, state, heads),
        # All channels of B and C, of which every rank of a group needs all, are whole.
        **({"conv1d": (inner, state, state)} if groups >= size else {}),
        **dict.fromkeys(("A_log", "dt_bias", "D"), (heads,)),
        **dict.fromkeys(("norm", "out_proj"), (inner,)),
    }


def units(layer: nn.Module, size: int) -> int:
    """The number of heads of keys, groups of heads or channels of ``layer`` that ``size`` ranks share.

    For Mamba 2 with fewer groups than ranks: the number of ranks.
    """
    kind = linear_attention_of(layer)
    if kind in (LinearAttention.MAMBA, LinearAttention.SHORT_CONVOLUTION):
        return kinds.own_shapes(part_of(layer, *CONVOLUTIONS))["weight"][0]
    if kind is LinearAttention.GATED_DELTA:
        return _number(layer, "num_k_heads")
    return max(_number(layer, "n_groups"), size)


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
    count = units(layer, size)
    kind = linear_attention_of(layer)
    assert kind is not None, "the role of linear attention is for such a layer"
    begin, end = near_even(count, size)[rank]
    found = {name: _number(layer, name) * (end - begin) // count for name in COUNTS[kind]}
    shared = shared_states_of(layer, size, rank)
    return found if shared is None else found | shared.counts()


def check_layers(model: str, layers: Mapping[str, nn.Module], size: int) -> None:
    """Raise ValueError that names every one of ``layers`` that ``size`` ranks cannot share."""
    told = [f"  {name} ({type(layer).__name__}): {why}" for name, layer in layers.items() for why in _why(layer, size)]
    if told:
        raise ValueError(
            f"ds_npu.parallel.tensor: found {size}; these layers of {model} cannot be sharded over so many ranks:\n"
            + "\n".join(told)
            + "\nWhat to do: fewer ranks, or give them the role replicated in ds_npu.plan"
        )


def _why(layer: nn.Module, size: int) -> Iterator[str]:
    adapted = [part for part, each in layer.named_children() if names.BASE_LAYER in dict(each.named_children())]
    if adapted:
        where = "which are sharded in other layers only (name those in target_modules)"
        yield f"its {', '.join(adapted)} have adapters (PEFT), {where}"
    if linear_attention_of(layer) is LinearAttention.MAMBA_2:
        yield from why_not_shared(layer, size)
    elif units(layer, size) < size:
        yield f"each rank needs a head of keys or a channel, and it has {units(layer, size)}"


def linear_attention_shards(plan: ModelPlan, modules: Mapping[str, nn.Module], size: int) -> dict[str, RoleShards]:
    """The shards of the linears of linear attention; raises ValueError for layers that ranks cannot share."""
    layers = {name: modules[name] for name in plan.named(Role.LINEAR_ATTENTION)}
    check_layers(plan.model, layers, size)
    return {
        f"{name}.{part}": shards_of(sections, units(layer, size), size)
        for name, layer in layers.items()
        for part, sections in sections_of(layer, size).items()
        if plan.of(f"{name}.{part}") in (Role.LINEAR_ATTENTION_INPUT, Role.LINEAR_ATTENTION_OUTPUT)
    }


def own_shards(name: str, layer: nn.Module, size: int) -> Iterator[tuple[str, str, Sharding]]:
    """Module, parameter and sharding of all that a layer shards but its projections, ``in_proj`` and ``out_proj``."""
    wanted = sections_of(layer, size)
    parts = dict(layer.named_children())
    for part in ("", *(each for each in (*CONVOLUTIONS, *NORMS, SUMMED, "dt_proj") if each in parts)):
        for leaf in kinds.own_shapes(layer.get_submodule(part)):
            if sections := wanted.get(part or leaf):
                sharding = shards_of(sections, units(layer, size), size).sharding(1 if part == SUMMED else 0)
                yield f"{name}.{part}".removesuffix("."), leaf, sharding


def by_heads(name: str, layer: nn.Module, axis: TensorAxis) -> Iterator[Change]:
    """Make the layer ``name`` count the heads of this rank, and compute with shards."""
    for key, count in local_counts(layer, axis.size, axis.rank).items():
        yield Change("sets", name, key, partial(set_attribute, layer, key, count))
    if SUMMED in dict(layer.named_children()):
        make = partial(wrap_forward, layer.get_submodule(SUMMED), partial(_summed, axis), Level.REGION)
        yield wrap(f"{name}.{SUMMED}", "a sum over the channels of all ranks", make)
    shared = shared_states_of(layer, axis.size, axis.rank)
    # Falcon-H1 has a factor for each output of in_proj, and counts the groups of its norm.
    if "mup_vector" in dict(layer.named_buffers(recurse=False)):
        ranges = shards_of(sections_of(layer, axis.size)["in_proj"], units(layer, axis.size), axis.size).ranges
        own = ranges[axis.rank] if shared is None else shared.projected()
        yield Change("sets", name, "mup_vector", partial(_keep_columns, layer, "mup_vector", own))
    norm = next((each for part, each in layer.named_children() if part in NORMS), None)
    if norm is not None and "n_groups" in attributes(norm, int):
        groups = local_counts(layer, axis.size, axis.rank)["n_groups"]
        yield Change("sets", f"{name}.norm", "n_groups", partial(set_attribute, norm, "n_groups", groups))
    yield wrap(name, "computes with shards of its weights", partial(wrap_forward, layer, with_shards, Level.REGION))
    if shared is not None:
        yield wrap(f"{name}.in_proj", "B and C are gathered", partial(shared.gather_states, layer, axis))
        yield wrap(name, "its channels of a whole convolution", partial(shared.use_own_channels, layer))
        if norm is not None and kinds.own_shapes(norm):
            make = partial(shared.normalise_over_ranks, layer, axis)
            yield wrap(f"{name}.norm", "a norm over the columns of all ranks", make)


def _summed(axis: TensorAxis, forward: Callable[P, torch.Tensor], *args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
    """Sum a linear's outputs over the channels of all ranks; each uses the sum for its own channels."""
    with allow_shard_access():
        return copy(reduce(forward(*args, **kwargs), axis.group), axis.group)


def _keep_columns(layer: nn.Module, buffer: str, ranges: Ranges) -> None:
    whole = layer.get_buffer(buffer)
    kept = torch.cat([whole[..., start:stop] for start, stop in ranges], -1)
    layer.register_buffer(buffer, kept, persistent=False)


def with_shards(forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Wrap the forward of a layer, whose own code computes with the shards of its weights."""
    with allow_shard_access():
        return forward(*args, **kwargs)


def _number(layer: nn.Module, name: str) -> int:
    found = attribute(layer, name, int)
    assert found is not None, f"transformers' {type(layer).__name__} has {name}"
    return found
