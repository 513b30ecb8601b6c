"""Losses that balance the load of experts and keep a router's logits small. Ranks exchange sums over tokens only.

Every layer adds a loss of its own:

    aux loss   E * sum over experts of f * P; 1 where all experts have equally many tokens (and equal scores)
    z-loss     the mean over tokens of logsumexp(logits) ** 2

f is the expert's fraction of all choices, P the mean over tokens of its score; gradients go through P.
Sources: Fedus et al. 2021 (Switch Transformers, arXiv 2101.03961); DeepSeek-V3 (arXiv 2412.19437) for sigmoid scores,
which are divided by their sum, and for losses of each sequence; Qiu et al. 2025 (arXiv 2501.11873) for counts of the
global batch; Zoph et al. 2022 (ST-MoE, arXiv 2202.08906) for the z-loss.
Shape letters: T tokens of this rank, K experts of each, E experts, B pieces of the batch that are balanced each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from ds_npu.comm.collectives import all_reduce
from ds_npu.comm.crossing import reduce
from ds_npu.parallel.expert.routing import histogram

Scores = Literal["softmax", "sigmoid"]
Over = Literal["micro_batch", "sequence", "global_batch"]


@dataclass(frozen=True)
class Routing:
    """The output of one layer's router for this rank's tokens."""

    logits: torch.Tensor
    """[T, E]."""
    ids: torch.Tensor
    """[T, K] int64: the experts of each token, before any is dropped."""
    scores: Scores | None
    """The function that makes scores of logits; None where no loss needs it."""

    @property
    def wide_logits(self) -> torch.Tensor:
        return self.logits.to(torch.promote_types(self.logits.dtype, torch.float32))

    def score_sums(self, pieces: int) -> torch.Tensor:
        """[B, E]: sums of scores over the tokens of each piece; the scores of a token add up to 1."""
        logits_TE = self.wide_logits
        if self.scores == "sigmoid":
            scores_TE = logits_TE.sigmoid()
            scores_TE = scores_TE / scores_TE.sum(1, keepdim=True)
        else:
            scores_TE = logits_TE.softmax(1)
        return torch.unflatten(scores_TE, 0, (pieces, -1)).sum(1)

    def counts(self, pieces: int) -> torch.Tensor:
        """[B, E] int64: the choices of each expert in each piece."""
        experts = self.logits.shape[1]
        piece_B1 = torch.arange(pieces, device=self.ids.device).unsqueeze(1)
        ids_BC = torch.unflatten(self.ids, 0, (pieces, -1)).flatten(1)
        keys_BC = torch.where((ids_BC >= 0) & (ids_BC < experts), ids_BC + piece_B1 * experts, pieces * experts)
        return histogram(keys_BC, pieces * experts).view(pieces, experts)


@dataclass(frozen=True)
class TokenRanks:
    """The groups of ranks whose tokens differ from this rank's."""

    peers: tuple[dist.ProcessGroup, ...]
    """Ranks with other tokens of the same sequences; a sum over one group after the other covers all of them."""
    everyone: tuple[dist.ProcessGroup, ...]
    """Ranks with tokens of the same or other sequences."""
    data: int
    """The number of micro-batches that ``everyone`` computes at a time; DeepSpeed averages their gradients."""


@dataclass(frozen=True)
class BalanceLosses:
    """The balancing losses and their coefficients."""

    aux: float = 0.0
    over: Over = "micro_batch"
    """The tokens over which f and P are taken; "global_batch": f over the micro-batches of all ranks at a time."""
    z: float = 0.0

    def of(self, layers: Sequence[Routing], samples: int, ranks: TokenRanks) -> torch.Tensor:
        """The loss [] of a micro-batch of ``samples`` sequences, the same on all ``ranks.peers``.

        In backward each rank gets the gradients of its own tokens. With "global_batch" the mean of the results over the
        data ranks is the loss of the global batch.
        """
        pieces = samples if self.over == "sequence" else 1
        counts = [each.counts(pieces) for each in layers] if self.aux else []
        sums = [each.score_sums(pieces) for each in layers] if self.aux else []
        groups = ranks.everyone if self.over == "global_batch" else ranks.peers
        all_counts = _parts(_summed(counts, groups), counts)
        squares = [torch.logsumexp(each.wide_logits, 1).square().sum().view(1) for each in layers] if self.z else []
        tokens = [each.new_full((1,), len(layer.ids)) for each, layer in zip(squares, layers, strict=False)]
        whole = torch.cat([each.flatten() for each in (*sums, *squares, *tokens)])
        for group in ranks.peers:
            whole = reduce(whole, group)
        parts = _parts(whole, [*sums, *squares, *tokens])
        data = ranks.data if self.over == "global_batch" else 1
        aux = sum(
            _balance(count_BE, sums_BE, layer.ids.shape[1] * data)
            for count_BE, sums_BE, layer in zip(all_counts, parts, layers, strict=False)
        )
        squares, tokens = parts[len(sums) : len(sums) + len(squares)], parts[len(sums) + len(squares) :]
        z = sum((square / count).squeeze(0) for square, count in zip(squares, tokens, strict=True))
        return whole.new_zeros(()) + self.aux * aux + self.z * z


def _balance(counts_BE: torch.Tensor, sums_BE: torch.Tensor, choices: float) -> torch.Tensor:
    """The aux loss [] of one layer: the mean over pieces, which have sum(counts) / ``choices`` tokens each."""
    counts_BE = counts_BE.to(sums_BE.dtype)
    all_B1 = counts_BE.sum(1, keepdim=True)
    fractions_BE = counts_BE / all_B1
    means_BE = sums_BE * choices / all_B1
    return counts_BE.shape[1] * (fractions_BE * means_BE).sum(1).mean()


def _summed(parts: Sequence[torch.Tensor], groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """All of ``parts``, flattened, summed over each of ``groups``."""
    whole = torch.cat([each.flatten() for each in parts]) if parts else torch.zeros(0)
    for group in groups if parts else ():
        whole = all_reduce(whole, group).wait()
    return whole


def _parts(whole: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    split = torch.split(whole, [each.numel() for each in like]) if like else []
    return [part.view_as(each) for part, each in zip(split, like, strict=True)]
