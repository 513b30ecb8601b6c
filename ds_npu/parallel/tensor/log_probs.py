"""Log-probabilities of tokens from hidden states and a head sharded over the tensor ranks, without the logits.

T tokens, H hidden, V this rank's words. Forward and backward compute the logits of ``TOKENS`` tokens at a time, so that
nothing of the size of all logits is kept. With log p_v the log-probability of word v at a token, the loss of a language
model is minus the sum of the targets' log p over the number of targets; its gradient over the words is softmax minus
one-hot (Shoeybi et al. 2019, arXiv:1909.08053, section 3), and that of the entropy h is -p_v (log p_v + h).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ds_npu.ops.autograd import Context, applied
from ds_npu.ops.matmul_accumulate import matmul_accumulate_
from ds_npu.ops.precision import accumulation_dtype
from ds_npu.parallel.tensor.sharding import Sharding

TOKENS = 1024
"""Whose logits are held at a time: enough for a matrix multiplication that is not bound by reading the weight."""


class TokenScores(NamedTuple):
    """What the head says of each token's target: [...], in float32 or float64, 0 where the target is ignored."""

    log_probs: torch.Tensor
    """Of the target. Differentiable."""
    entropy: torch.Tensor
    """Of the distribution over the words. Differentiable."""
    log_sum_sq_probs: torch.Tensor
    """log(sum_v p_v^2), without gradient."""
    mean_logits: torch.Tensor
    """Over the words, without gradient."""
    is_top1: torch.Tensor
    """Whether the target is the most likely word, the first of several; bool."""


@dataclass(frozen=True)
class LogitTransform:
    """What a model makes of the product with its head: ``softcap * tanh(scale * x / softcap) / temperature``."""

    scale: float = 1.0
    softcap: float | None = None
    """None: no tanh."""
    temperature: float = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        if self.softcap is not None:
            x = self.softcap * torch.tanh(x / self.softcap)
        return x / self.temperature

    def backward(self, logits: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the product, from that of the ``logits`` that ``__call__`` returned."""
        if self.softcap is not None:
            gradient = gradient * (1 - (logits * self.temperature / self.softcap).square())
        return gradient * (self.scale / self.temperature)


@dataclass(frozen=True)
class _Head:
    """What is known of a head beside its weights."""

    start: int
    """Its first word."""
    words: int
    """Of all ranks."""
    group: dist.ProcessGroup
    transform: LogitTransform
    dtype: torch.dtype
    """Of the products."""

    def product(self, hidden_TH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
        bias_V = None if bias_V is None else bias_V.to(self.dtype)
        x_TV = functional.linear(hidden_TH.to(self.dtype), weight_VH, bias_V)
        return self.transform(x_TV.to(accumulation_dtype(self.dtype)))


def _blocks(tokens: int) -> Iterator[slice]:
    return (slice(first, min(first + TOKENS, tokens)) for first in range(0, tokens, TOKENS))


class _ScoresContext(Context):
    head: _Head

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _ScoresContext,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_T: torch.Tensor,
        head: _Head,
    ) -> TokenScores:
        ctx.set_materialize_grads(False)
        words, local_T = len(weight_VH), targets_T - head.start
        elsewhere_T = (local_T < 0) | (local_T >= words)
        index_T1 = local_T.clamp(0, words - 1).unsqueeze(1)
        column_V = torch.arange(words, device=hidden_TH.device)
        # Rows: the largest logit, and the largest of the words before the target.
        tops_2T = hidden_TH.new_empty(2, len(hidden_TH), dtype=accumulation_dtype(head.dtype))
        # Rows: sums of e = exp(logit - top), e (logit - top), e^2 and the logits; the target's logit, which one has.
        sums_5T = tops_2T.new_empty(5, len(hidden_TH))
        cast_VH = weight_VH.to(head.dtype)
        for rows in _blocks(len(hidden_TH)):
            logits_TV = head.product(hidden_TH[rows], cast_VH, bias_V)
            tops_2T[0, rows] = logits_TV.amax(1)
            tops_2T[1, rows] = logits_TV.masked_fill(column_V >= local_T[rows, None], -math.inf).amax(1)
            sums_5T[3, rows] = logits_TV.sum(1)
            sums_5T[4, rows] = logits_TV.gather(1, index_T1[rows]).squeeze(1)
            logits_TV -= tops_2T[0, rows, None]
            e_TV = logits_TV.exp()
            sums_5T[0, rows] = e_TV.sum(1)
            sums_5T[1, rows] = (e_TV * logits_TV).sum(1)
            sums_5T[2, rows] = e_TV.square_().sum(1)
            del logits_TV, e_TV
        own_top_T = tops_2T[0].clone()
        dist.all_reduce(tops_2T, dist.ReduceOp.MAX, head.group)
        top_T, before_T = tops_2T
        # From this rank's top to that of all: e becomes e exp(down), and logit - top becomes logit - top + down.
        down_T = own_top_T - top_T
        sums_5T[1] += down_T * sums_5T[0]
        sums_5T[:2] *= down_T.exp()
        sums_5T[2] *= (2 * down_T).exp()
        sums_5T[4].masked_fill_(elsewhere_T, 0)
        dist.all_reduce(sums_5T, group=head.group)
        e_T, e_logit_T, e_squared_T, logit_T, target_T = sums_5T
        log_e_T = e_T.log()
        log_z_T, entropy_T = top_T + log_e_T, log_e_T - e_logit_T / e_T
        scores = TokenScores(
            target_T - top_T - log_e_T,
            entropy_T,
            e_squared_T.log() - 2 * log_e_T,
            logit_T / head.words,
            (target_T >= top_T) & (target_T > before_T),
        )
        ctx.head = head
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, log_z_T, entropy_T, index_T1, elsewhere_T)
        ctx.mark_non_differentiable(*scores[2:])
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: _ScoresContext, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden_TH, weight_VH, bias_V, log_z_T, entropy_T, index_T1, elsewhere_T = ctx.saved_tensors
        head, none_T = ctx.head, torch.zeros_like(log_z_T)
        of_log_p_T, of_entropy_T = (none_T if each is None else each for each in gradients[:2])
        at_target_T1 = of_log_p_T.masked_fill(elsewhere_T, 0).unsqueeze(1)
        gradient_TH = hidden_TH.new_empty(hidden_TH.shape)
        gradient_VH = log_z_T.new_zeros(weight_VH.shape)
        gradient_V = None if bias_V is None else log_z_T.new_zeros(bias_V.shape)
        cast_VH = weight_VH.to(head.dtype)
        for rows in _blocks(len(hidden_TH)):
            logits_TV = head.product(hidden_TH[rows], cast_VH, bias_V)
            log_p_TV = logits_TV - log_z_T[rows, None]
            weighted_TV = of_log_p_T[rows, None] + of_entropy_T[rows, None] * (log_p_TV + entropy_T[rows, None])
            block_TV = weighted_TV.mul_(log_p_TV.exp_()).neg_().scatter_add_(1, index_T1[rows], at_target_T1[rows])
            block_TV = head.transform.backward(logits_TV, block_TV)
            if gradient_V is not None:
                gradient_V += block_TV.sum(0)
            rounded_TV = block_TV.to(head.dtype)
            gradient_TH[rows] = (rounded_TV @ cast_VH).to(hidden_TH.dtype)
            matmul_accumulate_(gradient_VH, rounded_TV, hidden_TH[rows].to(head.dtype))
            del logits_TV, log_p_TV, weighted_TV, block_TV, rounded_TV
        # Each rank has the gradient from its words.
        dist.all_reduce(gradient_TH, group=head.group)
        of_bias = None if gradient_V is None or bias_V is None else gradient_V.to(bias_V.dtype)
        return gradient_TH, gradient_VH.to(weight_VH.dtype), of_bias, None, None


_scores = applied(_Scores, _Scores.forward)


class VocabParallelLogProbs:
    """Log-probabilities, entropies and top-1 hits of a head that is sharded by ``vocabulary`` over the tensor ranks.

    The loss of a language model is ``-scores.log_probs.sum() / count``. Where sequences are sharded too, a context rank
    passes the hidden states and targets of its own tokens and divides by the count of all: its share of the loss.
    """

    def __init__(self, group: dist.ProcessGroup, vocabulary: Sharding, transform: LogitTransform | None = None) -> None:
        """``group``: the tensor ranks, ``topology.group("tp")``."""
        self.words = vocabulary.size
        ((self.start, self.stop),) = vocabulary.ranges[dist.get_rank(group)]
        self.group = group
        self.transform = transform or LogitTransform()

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        bias: torch.Tensor | None = None,
        ignore_index: int = -100,
    ) -> TokenScores:
        """The scores [...] of ``targets`` [...] (int64, of all words), the same on every tensor rank.

        ``hidden`` [..., H]: the same on every tensor rank, as its gradient is; ``weight`` [V, H] and ``bias`` [V]:
        this rank's. The products are in autocast's dtype, or that of ``hidden``; all else is in float32, or float64.

        Messages: two all-reduces in forward, of 2 T and 5 T numbers, one in backward, of the gradient of ``hidden``.
        Memory: blocks of ``TOKENS`` x V logits and, in backward, the weight's gradient in float32.
        Raises ValueError for a weight of another shard.
        """
        if len(weight) != self.stop - self.start:
            raise ValueError(
                f"a head of {len(weight)} words was given; this rank's has the {self.stop - self.start} from "
                f"{self.start} on of {self.words}"
            )
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        head = _Head(self.start, self.words, self.group, self.transform, dtype)
        ignored = targets == ignore_index
        with torch.autocast(kind, enabled=False):
            found = _scores(hidden.flatten(0, -2), weight, bias, targets.masked_fill(ignored, 0).flatten(), head)
        return TokenScores(*(each.view(targets.shape).masked_fill(ignored, 0) for each in found))
