"""The heads that each rank of a Ulysses group computes, as data that all ranks know.

A rank computes some of the query heads over all tokens of its group, and receives only the key and value heads that
those use. Source: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv:2309.14509; any number of heads here.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_npu.parallel.tensor.sharding import near_even


@dataclass(frozen=True)
class Heads:
    """Ulysses rank r computes the query heads ``queries[r]``, with the key and value heads ``keys[r]``.

    Each query head belongs to one rank. A key and value head goes to all ranks whose query heads use it: with fewer of
    them than ranks they are replicated, and where all ranks need all of them, gathered.
    """

    queries: tuple[range, ...]
    keys: tuple[range, ...]
    queries_per_key: int

    def key_head_indices(self, rank: int) -> tuple[int, ...] | None:
        """The index of each query head's key and value head, among those of ``rank``.

        None where consecutive query heads share one evenly: the usual grouped-query attention.
        """
        queries, keys = self.queries[rank], self.keys[rank]
        used = tuple(head // self.queries_per_key - keys.start for head in queries)
        share = len(queries) // len(keys)
        return None if used == tuple(index // share for index in range(len(queries))) else used


def share_heads(query_heads: int, kv_heads: int, ranks: int) -> Heads:
    """Divide ``query_heads`` heads, consecutive and near-evenly, over ``ranks`` Ulysses ranks.

    ``query_heads / kv_heads`` consecutive query heads share a key and value head. Raises ValueError where the heads do
    not divide, or where a rank would have none.
    """
    if query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads cannot share {kv_heads} key and value heads evenly")
    if query_heads < ranks:
        raise ValueError(
            f"{query_heads} query heads (of this tensor rank) cannot be shared by {ranks} ranks of "
            f"ds_npu.context_parallel.ulysses, each of which needs one: found {ranks}, at most {query_heads} are "
            'possible (algorithm "ulysses" has all of ds_npu.parallel.context, "hybrid" leaves the others to a ring)'
        )
    share = query_heads // kv_heads
    queries = tuple(range(begin, end) for begin, end in near_even(query_heads, ranks))
    keys = tuple(range(mine[0] // share, mine[-1] // share + 1) for mine in queries)
    return Heads(queries, keys, share)
