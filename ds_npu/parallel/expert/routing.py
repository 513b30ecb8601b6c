"""Maps from the experts of each token to the rows that are sent, received and computed. Tensors only, no ranks.

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
    """[P] int64: the row that each copy is made from."""
    positions: torch.Tensor
    """[N, K] int32: the position of each copy in the order; dropped copies have positions after all others."""

    def permuted(self, x_NH: torch.Tensor) -> torch.Tensor:
        """The copies [P, H] of rows [N, H], in this order."""
        return x_NH.index_select(0, self.rows)

    def unpermuted(self, values_P: torch.Tensor) -> torch.Tensor:
        """[N, K]: the value of each copy, at the row and column it came from; 0 for dropped copies."""
        # Dropped copies read the 0 at the end.
        return torch.cat([values_P, values_P.new_zeros(1)])[self.positions.long().clamp(max=len(values_P))]


def weighted(x: torch.Tensor, weights_P: torch.Tensor) -> torch.Tensor:
    """x [P, ...], each row times its routing weight, in the dtype of x."""
    return (x * weights_P.unsqueeze(1)).to(x.dtype)


def order_by(keys_NK: torch.Tensor, kept: int) -> Order:
    """Sort copies by key, stably, and keep the first ``kept``."""
    order = torch.argsort(_sortable(keys_NK.reshape(-1)), stable=True)
    return Order(order[:kept] // keys_NK.shape[1], inverse(order).view_as(keys_NK))


def _sortable(keys: torch.Tensor) -> torch.Tensor:
    """``keys``, all below 2**24, as float32 on NPUs, which sort integers on the slow AiCPU (torch_npu warns of it)."""
    return keys if keys.device.type == "cpu" else keys.to(torch.float32)


def inverse(order: torch.Tensor) -> torch.Tensor:
    """int32: the position of each index in the permutation ``order``."""
    positions = torch.empty_like(order, dtype=torch.int32)
    positions[order.long()] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    return positions


def destinations(ids_TK: torch.Tensor, experts: int, ep: int, etp: int = 1) -> torch.Tensor:
    """The ranks that each token goes to: [T, min(K, ep) * etp] int64, each once, padded with ``ep * etp``.

    ids: int64; values outside 0 .. ``experts`` - 1 are no expert. Rank p along ep holds the experts / ep experts from p
    * (experts / ep); its etp ranks all receive its tokens.
    """
    is_expert = (ids_TK >= 0) & (ids_TK < experts)
    ep_rank_TK = _sortable(torch.where(is_expert, ids_TK // (experts // ep), ep)).sort(1).values
    again = torch.zeros_like(ep_rank_TK, dtype=torch.bool)
    again[:, 1:] = ep_rank_TK[:, 1:] == ep_rank_TK[:, :-1]
    ep_rank_TD = ep_rank_TK.masked_fill(again, ep).sort(1).values[:, : min(ids_TK.shape[1], ep)].to(torch.int64)
    if etp == 1:
        return ep_rank_TD
    ranks = ep_rank_TD.unsqueeze(2) * etp + torch.arange(etp, device=ids_TK.device)
    return ranks.clamp(max=ep * etp).flatten(1)


def local_ids(ids_NK: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """The experts ``first`` .. ``first + count - 1`` as 0 .. ``count`` - 1, all others as ``count``."""
    local = ids_NK - first
    return torch.where((local >= 0) & (local < count), local, count)


def histogram(keys: torch.Tensor, bins: int) -> torch.Tensor:
    """[bins] int64: how often each of 0 .. bins - 1 is in ``keys``; larger keys are not counted."""
    counts = torch.zeros(bins + 1, dtype=torch.int64, device=keys.device)
    flat = keys.reshape(-1).clamp(max=bins)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:bins]
