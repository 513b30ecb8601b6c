"""Context-parallel attention, over a sequence sharded over the context ranks: Ulysses, ring, both, or gathered keys.

Ulysses and ring together are USP: Fang and Zhao 2024, arXiv:2405.07719.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ds_npu.ops.attention import Mask, Options
from ds_npu.ops.attention.options import by_head, laid_out, sizes_of
from ds_npu.parallel.context.axis import ContextAxis
from ds_npu.parallel.context.blockwise_attention import KeyValueSource, blockwise_attention
from ds_npu.parallel.context.load_balance import Tokens, shard_documents, shard_evenly
from ds_npu.parallel.context.local_attention import LocalAttention
from ds_npu.parallel.context.ulysses import PostedTensor, UlyssesAllToAll, post_to_heads, post_to_tokens, share_heads


class UlyssesPlan(NamedTuple):
    """The Ulysses all-to-alls of one attention.

    ``query`` exchanges the query and, back, the output; ``key`` exchanges keys and values. This rank computes
    ``query_heads``. ``key_head_indices`` has, for each of them, the index of its key head among the key heads that
    this rank receives; None where consecutive query heads share one evenly.
    """

    query: UlyssesAllToAll
    key: UlyssesAllToAll
    query_heads: range
    key_head_indices: tuple[int, ...] | None


def ulysses_plan(axis: ContextAxis, heads: int, key_heads: int, tokens: Tokens) -> UlyssesPlan:
    """The all-to-alls of this rank's Ulysses group for ``heads`` query heads and ``key_heads`` key and value heads.

    A layer that overlaps them with its projections calls ``post_to_heads(q_proj(x), plan.query)`` right after each
    projection, and ``context_attention`` of the results. Raises ValueError, with the key, for fewer query heads than
    ranks.
    """
    shared = share_heads(heads, key_heads, axis.algorithm.ulysses)
    rank = axis.ulysses_rank
    first = axis.ring_rank * axis.algorithm.ulysses
    counts = tuple(tokens.count(first + inside) for inside in range(axis.algorithm.ulysses))
    query, key = (UlyssesAllToAll(axis.ulysses_group, rank, counts, each) for each in (shared.queries, shared.keys))
    return UlyssesPlan(query, key, shared.queries[rank], shared.key_head_indices(rank))


def context_attention(
    q: torch.Tensor | PostedTensor,
    k: torch.Tensor | PostedTensor,
    v: torch.Tensor | PostedTensor,
    axis: ContextAxis,
    options: Options | None = None,
    tokens: Tokens | None = None,
) -> torch.Tensor:
    """This rank's rows of attention over the whole sequence, laid out as ``q``, with the values' width.

    q [B, S / cp, N, D] (by ``options.layout``), k and v of the same shape except that they may have fewer heads and v
    another width, hold this rank's part of ``tokens``; each is a tensor, or the result of ``post_to_heads``. Without
    ``tokens`` the ranks have equal numbers, by ``shard_evenly`` (contiguous with Ulysses, zigzag with a ring), in
    layout TND by ``shard_documents`` of the mask's documents. ``options.mask`` is of the whole sequence: its bounds, or
    a ``dense`` one [..., S, S]; attention never crosses ``tokens.documents``. Accumulates in float32 (float64 for
    float64). ``options.sinks`` are the same on every rank; each rank gets their gradient from the rows and heads that
    it computes. Raises ValueError where sizes, mask and tokens do not match.
    """
    options = options or Options()
    given = [x.sent if isinstance(x, PostedTensor) else x for x in (q, k, v)]
    views = [by_head(x, options.layout, n).transpose(1, 2) for x, n in zip(given, _heads(given, options), strict=True)]
    tokens = tokens or _default_tokens(views[0].shape[1], axis, options.mask)
    _check(views, axis, options, tokens)
    plan = ulysses_plan(axis, views[0].shape[2], views[1].shape[2], tokens)
    posted = [
        x if isinstance(x, PostedTensor) else post_to_heads(view, all_to_all)
        for x, view, all_to_all in zip((q, k, v), views, (plan.query, plan.key, plan.key), strict=True)
    ]
    query, key, value = (each.wait() for each in posted)
    local = _local_attention(axis, tokens, options, plan, views[0].shape[3])

    def receive_again(sent: torch.Tensor) -> Callable[[], torch.Tensor]:
        pending = plan.key.to_heads(sent)
        return lambda: local.join_samples(pending.wait())

    sent = (views[1].detach(), views[2].detach())
    source = KeyValueSource(sent, receive_again) if local.repeats_all_to_all else None
    own = (local.join_samples(key), local.join_samples(value))
    of_heads = None if options.sinks is None else options.sinks[plan.query_heads.start : plan.query_heads.stop]
    out = blockwise_attention(local.join_samples(query), own, local, source, of_heads)
    out = post_to_tokens(local.separate_samples(out), plan.query).wait()
    return laid_out(out.transpose(1, 2), options.layout)


def _heads(given: Sequence[torch.Tensor], options: Options) -> tuple[int, int, int]:
    """The numbers of heads of query, key and value in layout SBH; zeros in layouts whose shape shows them."""
    if options.layout != "SBH":
        return 0, 0, 0
    q, k, _ = given
    of_keys = k.shape[2] * options.heads // q.shape[2]
    return options.heads, of_keys, of_keys


def _default_tokens(tokens: int, axis: ContextAxis, mask: Mask) -> Tokens:
    if mask.ends_q:
        documents = [range(begin, end) for begin, end in itertools.pairwise((0, *mask.ends_q))]
        return shard_documents(1, mask.ends_q[-1], documents, axis.algorithm)
    return shard_evenly(tokens * axis.size, axis.algorithm)


def _check(views: Sequence[torch.Tensor], axis: ContextAxis, options: Options, tokens: Tokens) -> None:
    q, k, v = views
    sizes_of(q, k, v, Options("BSND"))
    wanted = tokens.count(axis.rank)
    if q.shape[1] != wanted or k.shape[1] != wanted or tokens.samples not in (1, q.shape[0]):
        raise ValueError(
            f"context rank {axis.rank} of {axis.size} has {wanted} tokens of each of {tokens.samples} samples of "
            f"{tokens.length}; found q {list(q.shape)} and k {list(k.shape)} [B, S, N, D]: give it the tokens "
            "that Tokens.index names"
        )
    if len(tokens.ring) != axis.algorithm.ring or tokens.ulysses != axis.algorithm.ulysses:
        raise ValueError(
            f"the tokens are sharded over {len(tokens.ring)} x {tokens.ulysses} ranks, not for {axis.algorithm}"
        )
    mask, whole = options.mask, tokens.length
    if mask.dense is not None and (
        tokens.total != whole or len(tokens.documents) > 1 or mask.dense.shape[-2:] != (whole, whole)
    ):
        raise ValueError(
            f"a dense mask {list(mask.dense.shape)} must be the whole [..., {whole}, {whole}] on each context "
            "rank, with documents and padding in it"
        )


def _local_attention(
    axis: ContextAxis, tokens: Tokens, options: Options, plan: UlyssesPlan, width: int
) -> LocalAttention:
    mask, heads = options.mask, plan.query_heads
    if mask.dense is not None and mask.dense.dim() > 2 and mask.dense.shape[-3] > 1:
        mask = Mask(dense=mask.dense[..., heads.start : heads.stop, :, :])
    scale = float(width**-0.5) if options.scale is None else options.scale
    mask = replace(mask, ends_q=(), ends_k=())
    return LocalAttention(axis, tokens, mask, scale, options.dropout_p, plan.key_head_indices, options.softcap)
