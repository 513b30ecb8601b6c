"""Attention over a sequence whose tokens are spread over the context ranks: Ulysses, ring, both, or gathered keys."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ds_npu.ops.attention import Mask, Options
from ds_npu.ops.attention.options import by_head, laid_out, sizes_of
from ds_npu.parallel.context.axis import ContextAxis
from ds_npu.parallel.context.load_balance import Tokens, split_documents, split_evenly
from ds_npu.parallel.context.local_attention import Work
from ds_npu.parallel.context.ring_autograd import Origin, blockwise_attention
from ds_npu.parallel.context.ulysses import Exchange, InFlight, depart_to_heads, depart_to_tokens
from ds_npu.parallel.context.ulysses_heads import share_heads


class Exchanges(NamedTuple):
    """The Ulysses exchanges of one attention: of the query (and, backwards, of out), and of key and value.

    ``repeated``: the place, among the keys that a rank receives, of the one of each of its query heads; None where they
    share them evenly. ``queries`` are the query heads it computes.
    """

    query: Exchange
    key: Exchange
    queries: range
    repeated: tuple[int, ...] | None


def head_exchanges(axis: ContextAxis, heads: int, key_heads: int, tokens: Tokens) -> Exchanges:
    """What the Ulysses ranks of ``axis`` exchange of so many heads of the query, and of key and value.

    For layers whose projections overlap with it: ``depart_to_heads(q_proj(x), exchanges.query)`` right behind each,
    and ``context_attention`` of what departed. Raises ValueError, with the key, for fewer heads than ranks.
    """
    shared, rank = share_heads(heads, key_heads, axis.algorithm.ulysses), axis.ulysses_rank
    first = axis.ring_rank * axis.algorithm.ulysses
    counts = tuple(tokens.count(first + inside) for inside in range(axis.algorithm.ulysses))
    query, key = (Exchange(axis.ulysses_group, rank, counts, each) for each in (shared.queries, shared.keys))
    return Exchanges(query, key, shared.queries[rank], shared.repeated(rank))


def context_attention(
    q: torch.Tensor | InFlight,
    k: torch.Tensor | InFlight,
    v: torch.Tensor | InFlight,
    axis: ContextAxis,
    options: Options | None = None,
    tokens: Tokens | None = None,
) -> torch.Tensor:
    """This rank's rows of attention over the whole sequence, laid out as ``q``, with the values' width.

    q [B, S / cp, N, D] (by ``options.layout``), k and v alike with fewer heads, v with a width of its own: those of
    ``tokens`` that this rank has. Without ``tokens`` the sequence has as many on every rank: contiguous ones with
    Ulysses, else ``split_evenly``'s; in layout TND ``split_documents``'s of the mask's documents. ``options.mask`` is
    of the whole sequence: its bounds, or a ``dense`` one [..., S, S]; attention never crosses ``tokens.documents``.
    Accumulates in float32 (float64 for float64). Raises ValueError where sizes, mask and tokens do not go together.
    """
    options = options or Options()
    given = [x.sent if isinstance(x, InFlight) else x for x in (q, k, v)]
    views = [by_head(x, options.layout, n).transpose(1, 2) for x, n in zip(given, _heads(given, options), strict=True)]
    tokens = tokens or _usual(views[0].shape[1], axis, options.mask)
    _check(views, axis, options, tokens)
    exchanges = head_exchanges(axis, views[0].shape[2], views[1].shape[2], tokens)
    flights = [
        x if isinstance(x, InFlight) else depart_to_heads(view, exchange)
        for x, view, exchange in zip((q, k, v), views, (exchanges.query, exchanges.key, exchanges.key), strict=True)
    ]
    query, key, value = (flight.arrive() for flight in flights)
    work = _work(axis, tokens, options, exchanges, views[0].shape[3])

    def again(sent: torch.Tensor) -> Callable[[], torch.Tensor]:
        pending = exchanges.key.to_heads(sent)
        return lambda: work.flat(pending.wait())

    origin = Origin((views[1].detach(), views[2].detach()), again) if work.exchanges_again else None
    out = blockwise_attention(work.flat(query), (work.flat(key), work.flat(value)), work, origin)
    out = depart_to_tokens(work.batched(out), exchanges.query).arrive()
    return laid_out(out.transpose(1, 2), options.layout)


def _heads(given: Sequence[torch.Tensor], options: Options) -> tuple[int, int, int]:
    """The heads of query, key and value, which only layout SBH does not show."""
    if options.layout != "SBH":
        return 0, 0, 0
    q, k, _ = given
    of_keys = k.shape[2] * options.heads // q.shape[2]
    return options.heads, of_keys, of_keys


def _usual(tokens: int, axis: ContextAxis, mask: Mask) -> Tokens:
    if mask.ends_q:
        documents = [range(begin, end) for begin, end in itertools.pairwise((0, *mask.ends_q))]
        return split_documents(1, mask.ends_q[-1], documents, axis.algorithm)
    return split_evenly(tokens * axis.size, axis.algorithm)


def _check(views: Sequence[torch.Tensor], axis: ContextAxis, options: Options, tokens: Tokens) -> None:
    """Raises ValueError for what does not go together."""
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
            f"the tokens are split over {len(tokens.ring)} x {tokens.ulysses} ranks, not for {axis.algorithm}"
        )
    mask, whole = options.mask, tokens.length
    if mask.dense is not None and (
        tokens.total != whole or len(tokens.documents) > 1 or mask.dense.shape[-2:] != (whole, whole)
    ):
        raise ValueError(
            f"a dense mask {list(mask.dense.shape)} must be the whole [..., {whole}, {whole}] on each context "
            "rank, with documents and padding in it"
        )


def _work(axis: ContextAxis, tokens: Tokens, options: Options, exchanges: Exchanges, width: int) -> Work:
    mask, queries = options.mask, exchanges.queries
    if mask.dense is not None and mask.dense.dim() > 2 and mask.dense.shape[-3] > 1:
        mask = Mask(dense=mask.dense[..., queries.start : queries.stop, :, :])
    scale = float(width**-0.5) if options.scale is None else options.scale
    return Work(axis, tokens, replace(mask, ends_q=(), ends_k=()), scale, options.dropout_p, exchanges.repeated)
