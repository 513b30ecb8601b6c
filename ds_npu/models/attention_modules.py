"""The heads of an attention, those of each tensor rank, and the sizes of its linears and of those of an MLP."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from ds_npu.config.roles import Role
from ds_npu.models import kinds
from ds_npu.models.attributes import attribute, attributes
from ds_npu.models.hugging_face_model import HuggingFaceConfig, setting
from ds_npu.models.plan import AttentionShape
from ds_npu.parallel.tensor.sharding import near_even

Linears = Mapping[Role, list[nn.Module]]
"""The linears (and norms) of one attention or MLP, by role; an empty list where there are none."""


HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
KEY_VALUE_HEADS = ("num_kv_heads", "num_key_value_heads", "kv_heads")
"""Attributes in which attentions keep their numbers of heads."""


def configured(attention: nn.Module, config: HuggingFaceConfig) -> AttentionShape | None:
    """The heads of a Hugging Face attention: their number from ``config``, their width from its own attributes.

    None where the config has no heads.
    """
    heads = setting(config, "num_attention_heads", int)
    if heads is None:
        return None
    own = attributes(attention, int)
    heads = next((own[name] for name in HEADS if own.get(name)), heads)
    groups = own.get("num_key_value_groups")
    # Layers of one model may differ, so that a module's own numbers come first.
    kv_heads = next((own[name] for name in KEY_VALUE_HEADS if own.get(name)), None)
    kv_heads = kv_heads or (heads // groups if groups else setting(config, "num_key_value_heads", int) or heads)
    if own.get("kv_lora_rank"):
        nope, rope, value = (own[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        return AttentionShape(heads, heads, nope + rope, value, nope)
    hidden = setting(config, "hidden_size", int) or 0
    width = own.get("head_dim") or setting(config, "head_dim", int) or hidden // heads
    return AttentionShape(heads, kv_heads, width, own.get("v_head_dim") or width)


def counted(attention: nn.Module, linears: Linears) -> AttentionShape | None:
    """The heads of a user's own attention, from its attribute ``head_dim`` and the sizes of its linears.

    With one linear for queries, keys and values, its attribute ``num_heads`` is needed, too. None without these.
    """
    width = attribute(attention, "head_dim", int)
    if width is None or width < 1:
        return None
    rows = {role: kinds.sizes(found[0])[1] for role, found in linears.items() if found}
    if Role.QUERY_KEY_VALUE in rows:
        heads = attribute(attention, "num_heads", int)
        if heads is None:
            return None
        kv_heads = (rows[Role.QUERY_KEY_VALUE] // width - heads) // 2
        return AttentionShape(heads, max(kv_heads, 1), width, width)
    if not {Role.QUERY, Role.KEY, Role.VALUE} <= set(rows):
        return None
    kv_heads = max(rows[Role.KEY] // width, 1)
    return AttentionShape(rows[Role.QUERY] // width, kv_heads, width, rows[Role.VALUE] // kv_heads)


def wrong_heads(shape: AttentionShape, linears: Linears) -> Iterator[tuple[nn.Module, str]]:
    """Yield each linear or norm of an attention whose size contradicts ``shape``, and why."""
    fused = shape.heads * shape.head_dim + shape.kv_heads * (shape.head_dim + shape.value_dim)
    outputs = {
        Role.KEY: shape.kv_heads * shape.head_dim,
        Role.VALUE: shape.kv_heads * shape.value_dim,
        Role.QUERY_KEY_VALUE: fused,
        Role.QUERY_KEY_VALUE_BY_GROUP: fused,
        Role.LATENT_KEY_VALUE: shape.heads * (shape.latent_key_dim + shape.value_dim),
    }
    for role, expected in outputs.items():
        yield from _other_outputs(linears[role], expected, f"the {role} of {shape}")
    # Each head of a query may have a gate as well (Qwen3-Next, A.X K2).
    for role in (Role.QUERY, Role.LATENT_QUERY):
        for linear in linears[role]:
            if kinds.sizes(linear)[1] not in _query_widths(shape):
                yield from _other_outputs([linear], shape.heads * shape.head_dim, f"the {role} of {shape}")
    for linear in linears[Role.ATTENTION_GATE]:
        if kinds.sizes(linear)[1] % shape.heads:
            yield linear, f"an {Role.ATTENTION_GATE} of {shape} has outputs for each head, not {kinds.sizes(linear)[1]}"
    expected = shape.heads * shape.value_dim
    for linear in linears[Role.ATTENTION_OUTPUT]:
        if (found := kinds.sizes(linear)[0]) != expected:
            yield linear, f"the {Role.ATTENTION_OUTPUT} of {shape} has {expected} inputs, not {found}"
    fused_linears = (*linears[Role.QUERY_KEY_VALUE], *linears[Role.QUERY_KEY_VALUE_BY_GROUP])
    for linear in (*linears[Role.KEY], *fused_linears) if shape.heads % shape.kv_heads else ():
        yield linear, f"{shape.heads} heads cannot share {shape.kv_heads} heads of keys and values evenly"
    yield from _wrong_norms(shape, linears)


def _query_widths(shape: AttentionShape) -> tuple[int, int]:
    """The outputs of a linear for queries, without and with gates."""
    return shape.heads * shape.head_dim, shape.heads * (shape.head_dim + shape.value_dim)


def _other_outputs(linears: Iterable[nn.Module], expected: int, what: str) -> Iterator[tuple[nn.Module, str]]:
    for linear in linears:
        if (found := kinds.sizes(linear)[1]) != expected:
            yield linear, f"{what} has {expected} outputs, not {found}"


def _wrong_norms(shape: AttentionShape, linears: Linears) -> Iterator[tuple[nn.Module, str]]:
    """Yield each norm whose width does not fit its role (over one head, over all heads), and why."""
    latents = [kinds.sizes(each)[0] for role in (Role.LATENT_QUERY, Role.LATENT_KEY_VALUE) for each in linears[role]]
    latents += [each // 2 for each in latents if each % 2 == 0 and linears[Role.LATENT]]
    for norm in linears[Role.HEAD_NORM]:
        found = {size for own in kinds.own_shapes(norm).values() for size in own}
        # Of latent attention the rotary part of a key may have a norm of its own (dots3).
        if found - {shape.head_dim, shape.value_dim, shape.head_dim - shape.latent_key_dim, *latents}:
            over = "one head" + "".join(f" or a latent of {size}" for size in latents)
            yield norm, f"a {Role.HEAD_NORM} of {shape} is over {over}; this one is over {max(found)}"
    for norm in linears[Role.SHARDED_NORM]:
        found = {size for own in kinds.own_shapes(norm).values() for size in own}
        if found - over_all_heads(shape):
            yield norm, f"a {Role.SHARDED_NORM} of {shape} is over all heads; this one is over {max(found)}"


def over_all_heads(shape: AttentionShape) -> set[int]:
    """The widths of norms over all heads of queries, keys or values."""
    return {shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.heads * shape.value_dim}


def wrong_widths(linears: Linears) -> Iterator[tuple[nn.Module, str]]:
    """Yield each linear of an MLP whose outputs do not match the inputs of its down projection, and why."""
    for down in linears[Role.DOWN]:
        width = kinds.sizes(down)[0]
        for role, expected in ((Role.GATE, width), (Role.UP, width), (Role.GATE_UP, 2 * width)):
            yield from _other_outputs(linears[role], expected, f"the {role} beside a down with {width} inputs")


@dataclass(frozen=True)
class LocalHeads:
    """The heads of one attention that one tensor rank computes."""

    queries: range
    key_values: tuple[int, ...]
    """One for each group of query heads, or one for each query head where the rank's groups differ in size."""


def local_heads(shape: AttentionShape, tensor_size: int) -> list[LocalHeads]:
    """The heads of each of ``tensor_size`` ranks; raises ValueError for fewer query heads than ranks."""
    group = shape.heads // shape.kv_heads
    return [
        LocalHeads(range(start, stop), _key_values(range(start, stop), group))
        for start, stop in near_even(shape.heads, tensor_size, "heads")
    ]


def _key_values(queries: range, group: int) -> tuple[int, ...]:
    each = [query // group for query in queries]
    counts = {len(list(same)) for _, same in itertools.groupby(each)}
    return tuple(dict.fromkeys(each)) if len(counts) == 1 else tuple(each)
