"""Which rows go where: from the experts of each token to rows sent, received and computed. Tensors only, no ranks.

Shape letters: T tokens of this rank, K experts of each, N rows that a rank receives, P pairs of a row and an expert
that it computes, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Order:
    """Copies of rows in the order of their keys."""

    rows: torch.Tensor
    """[P] int64: of which row each copy is."""
    places: torch.Tensor
    """[N, K] int32: where each copy went; those that are dropped have places behind all others."""

    def permuted(self, x_NH: torch.Tensor) -> torch.Tensor:
        """The copies [P, H] of rows [N, H], in this order."""
        return x_NH.index_select(0, self.rows)

    def placed(self, values_P: torch.Tensor) -> torch.Tensor:
        """[N, K]: the value of each copy where it came from; 0 for those that are dropped."""
        # One 0 behind all, for what is dropped.
        return torch.cat([values_P, values_P.new_zeros(1)])[self.places.long().clamp(max=len(values_P))]


def order_by(keys_NK: torch.Tensor, kept: int) -> Order:
    """Sort by key; copies of equal keys keep their order. The first ``kept`` are kept."""
    order = torch.argsort(_sortable(keys_NK.reshape(-1)), stable=True)
    return Order(order[:kept] // keys_NK.shape[1], inverse(order).view_as(keys_NK))


def _sortable(keys: torch.Tensor) -> torch.Tensor:
    """The same numbers, all below 2**24: NPUs sort integers on their few scalar cores (AiCPU), as torch_npu warns."""
    return keys if keys.device.type == "cpu" else keys.to(torch.float32)


def inverse(order: torch.Tensor) -> torch.Tensor:
    """int32: the place of each index in ``order``, a permutation."""
    places = torch.empty_like(order, dtype=torch.int32)
    places[order.long()] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    return places


def destinations(ids_TK: torch.Tensor, experts: int, ep: int, etp: int = 1) -> torch.Tensor:
    """The ranks that each token goes to: [T, min(K, ep) * etp] int64, each once, then ``ep * etp`` for none.

    ids: int64, experts from 0; anything else than 0 .. ``experts`` - 1 is no expert. Rank p along ep holds experts p *
    (experts / ep) and the following; all etp ranks of a place along ep get its tokens.
    """
    is_expert = (ids_TK >= 0) & (ids_TK < experts)
    place_TK = _sortable(torch.where(is_expert, ids_TK // (experts // ep), ep)).sort(1).values
    again = torch.zeros_like(place_TK, dtype=torch.bool)
    again[:, 1:] = place_TK[:, 1:] == place_TK[:, :-1]
    place_TD = place_TK.masked_fill(again, ep).sort(1).values[:, : min(ids_TK.shape[1], ep)].to(torch.int64)
    if etp == 1:
        return place_TD
    ranks = place_TD.unsqueeze(2) * etp + torch.arange(etp, device=ids_TK.device)
    return ranks.clamp(max=ep * etp).flatten(1)


def local_ids(ids_NK: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """The experts ``first`` and following as 0 .. ``count`` - 1, all others as ``count``."""
    local = ids_NK - first
    return torch.where((local >= 0) & (local < count), local, count)


def histogram(keys: torch.Tensor, bins: int) -> torch.Tensor:
    """[bins] int64: how often each of 0 .. bins - 1 is in ``keys``; larger keys are not counted."""
    counts = torch.zeros(bins + 1, dtype=torch.int64, device=keys.device)
    flat = keys.reshape(-1).clamp(max=bins)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:bins]
