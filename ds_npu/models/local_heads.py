"""The heads of an attention that each tensor rank computes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ds_npu.models.plan import AttentionShape
from ds_npu.parallel.tensor.sharding import near_even


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
