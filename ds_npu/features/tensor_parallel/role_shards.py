"""The outputs or inputs of each weight that a tensor rank works on, by the weight's role: arithmetic on sizes only.

Attention is sharded by heads: query heads as evenly as possible; key and value heads with their query heads where tp
divides their number. Where it does not (or there are fewer than ranks), each rank keeps the whole key and value weights
and computes the heads that its query heads need.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ds_npu.config.roles import Role
from ds_npu.models import names
from ds_npu.models.attention_modules import local_heads
from ds_npu.models.plan import AttentionShape, ModelPlan
from ds_npu.parallel.tensor.sharding import Ranges, Sharding, near_even


@dataclass(frozen=True)
class RoleShards:
    """The outputs (of a column linear) or inputs (of a row linear) of one weight that each tensor rank works on."""

    size: int
    """The number of outputs or inputs over all ranks."""
    ranges: tuple[Ranges, ...]
    whole: bool = False
    """Whether every rank keeps the whole weight, because the ranks' ranges overlap."""

    def sharding(self, dim: int) -> Sharding:
        """The Sharding of the weight along ``dim``, for a weight that is not ``whole``."""
        assert not self.whole
        return Sharding(dim, self.size, self.ranges)

    def outputs(self, rank: int) -> Ranges | None:
        """The outputs that ``rank`` computes with a whole weight; None with a shard."""
        return self.ranges[rank] if self.whole else None

    @property
    def lengths(self) -> tuple[int, int]:
        """The least and the most that a rank works on."""
        found = [sum(stop - start for start, stop in ranges) for ranges in self.ranges]
        return min(found), max(found)


def _heads(count: int, size: int, width: int) -> tuple[Ranges, ...]:
    return tuple(((start * width, stop * width),) for start, stop in near_even(count, size, "heads"))


def _queries(outputs: int, shape: AttentionShape, size: int) -> RoleShards:
    return RoleShards(outputs, _heads(shape.heads, size, outputs // shape.heads))


def _key_value(outputs: int, shape: AttentionShape, size: int) -> RoleShards:
    width = outputs // shape.kv_heads
    if shape.kv_heads % size == 0:
        return RoleShards(outputs, _heads(shape.kv_heads, size, width))
    needed = [_joined(local.key_values, width) for local in local_heads(shape, size)]
    return RoleShards(outputs, tuple(needed), whole=True)


def _joined(heads: tuple[int, ...], width: int) -> Ranges:
    """The index ranges of ``heads``, adjacent ones merged."""
    ranges: list[tuple[int, int]] = []
    for head in heads:
        if ranges and ranges[-1][1] == head * width:
            ranges[-1] = (ranges[-1][0], (head + 1) * width)
        else:
            ranges.append((head * width, (head + 1) * width))
    return tuple(ranges)


def _fused(outputs: int, shape: AttentionShape, size: int) -> RoleShards:
    width = outputs // (shape.heads + 2 * shape.kv_heads)
    parts = [
        _queries(shape.heads * width, shape, size),
        _key_value(shape.kv_heads * width, shape, size),
        _key_value(shape.kv_heads * width, shape, size),
    ]
    return RoleShards(outputs, _one_behind_the_other(parts), any(part.whole for part in parts))


def _fused_by_group(outputs: int, shape: AttentionShape, size: int) -> RoleShards:
    if shape.kv_heads % size:
        raise ValueError(f"{size} ranks cannot share its {shape.kv_heads} heads of keys and values evenly")
    return RoleShards(outputs, _heads(shape.kv_heads, size, outputs // shape.kv_heads))


def _norm(width: int, shape: AttentionShape, size: int) -> RoleShards:
    """The shards of a norm over all heads, of queries (or outputs) or of keys."""
    if width == shape.heads * shape.head_dim or width == shape.heads * shape.value_dim:
        return _queries(width, shape, size)
    if shape.kv_heads % size:
        raise ValueError(f"{size} ranks cannot share its {shape.kv_heads} heads of keys evenly")
    return _key_value(width, shape, size)


def _one_behind_the_other(parts: list[RoleShards]) -> tuple[Ranges, ...]:
    starts = [0, *itertools.accumulate(part.size for part in parts)]
    return tuple(
        tuple(
            (start + first, start + last)
            for start, part in zip(starts, parts, strict=False)
            for first, last in part.ranges[rank]
        )
        for rank in range(len(parts[0].ranges))
    )


def even_shards(count: int, size: int, what: str = "columns") -> RoleShards:
    """One range a rank, as even as possible; raises ValueError for fewer than one for each."""
    return RoleShards(count, tuple((each,) for each in near_even(count, size, what)))


def _words(count: int, size: int) -> RoleShards:
    return even_shards(count, size, "words")


def paired_shards(count: int, size: int) -> RoleShards:
    """Two ranges a rank, of gate and of up, which stand one behind the other; each as even as possible."""
    return RoleShards(count, _one_behind_the_other([even_shards(count // 2, size)] * 2))


BY_HEADS: dict[Role, Callable[[int, AttentionShape, int], RoleShards]] = {
    Role.QUERY: _queries,
    Role.KEY: _key_value,
    Role.VALUE: _key_value,
    Role.QUERY_KEY_VALUE: _fused,
    Role.QUERY_KEY_VALUE_BY_GROUP: _fused_by_group,
    Role.ATTENTION_GATE: _queries,
    Role.SHARDED_NORM: _norm,
    Role.LATENT_QUERY: _queries,
    Role.LATENT_KEY_VALUE: _queries,
    Role.ATTENTION_OUTPUT: _queries,
}
BY_WIDTH: dict[Role, Callable[[int, int], RoleShards]] = {
    Role.GATE: even_shards,
    Role.UP: even_shards,
    Role.GATE_UP: paired_shards,
    Role.DOWN: even_shards,
    Role.SHARDED_NORM: even_shards,
    Role.COLUMN: even_shards,
    Role.ROW: even_shards,
    Role.HEAD: _words,
    Role.EMBEDDING: _words,
}
ROW_ROLES = (Role.ATTENTION_OUTPUT, Role.LINEAR_ATTENTION_OUTPUT, Role.DOWN, Role.ROW)
"""Roles of linears that are sharded along their inputs; all others are sharded along their outputs."""


def role_shards_of(plan: ModelPlan, widths: Mapping[str, int], size: int) -> dict[str, RoleShards]:
    """Each module's shards over ``size`` tensor ranks; ``widths``: the outputs (row linear: inputs) of each module.

    Raises ValueError that names every module that cannot be sharded over so many ranks.
    """
    shards: dict[str, RoleShards] = {}
    problems: dict[tuple[str, str], list[str]] = {}
    for name, width in widths.items():
        role = plan.roles[name]
        try:
            if role in BY_HEADS and (role not in BY_WIDTH or plan.around(name, Role.ATTENTION)):
                shards[name] = BY_HEADS[role](width, _shape(plan, name), size)
            else:
                shards[name] = BY_WIDTH[role](width, size)
        except ValueError as error:
            problems.setdefault((names.generic(name), f"({role}, {width} wide): {error}"), []).append(name)
    if problems:
        told = [f"  {names.abbreviated(like)} {why}" for (_, why), like in problems.items()]
        raise ValueError(
            f"ds_npu.parallel.tensor: found {size}; these modules of {plan.model} cannot be sharded over so many "
            "ranks:\n" + "\n".join(told)
        )
    return shards


def _shape(plan: ModelPlan, name: str) -> AttentionShape:
    owner = next((each for each in plan.attentions if name.startswith(f"{each}.")), None)
    if owner is None:
        raise ValueError("its heads are not known; give it the role column or row")
    return plan.attentions[owner]
