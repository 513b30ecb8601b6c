"""Log-probabilities of tokens from hidden states and a head sharded over the tensor ranks, without the logits.

T tokens, H hidden, V this rank's words. Forward and backward compute the logits of ``TOKENS`` tokens at a time, so that
nothing of the size of all logits is kept. With log p_v the log-probability of word v at a token, the loss of a language
model is minus the sum of the targets' log p over the number of targets; its gradient over the words is softmax minus
one-hot (Shoeybi et al. 2019, arXiv:1909.08053, section 3), and that of the entropy h is -p_v (log p_v + h).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ds_npu.ops.autograd import Context, applied
from ds_npu.ops.precision import accumulation_dtype
from ds_npu.parallel.tensor.chunked_head import TOKENS, HeadGradients, HeadShard, check_head, chunks, product_dtype
from ds_npu.parallel.tensor.sharding import Sharding


class TokenScores(NamedTuple):
    """The scores of each token's target: [...], in float32 or float64, 0 where the target is ignored."""

    log_probs: torch.Tensor
    """The log-probability of the target. Differentiable."""
    entropy: torch.Tensor
    """The entropy of the distribution over the words. Differentiable."""
    log_sum_sq_probs: torch.Tensor
    """log(sum_v p_v^2), without gradient."""
    mean_logits: torch.Tensor
    """The mean of the logits over the words, without gradient."""
    is_top1: torch.Tensor
    """Whether the target is the most likely word, the first of several; bool."""


@dataclass(frozen=True)
class LogitTransform:
    """A model's change of the product with its head: ``softcap * tanh(scale * x / softcap) / temperature``."""

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
    shard: HeadShard
    transform: LogitTransform

    def logits(self, hidden_CH: torch.Tensor, cast_VH: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
        return self.transform(self.shard.product(hidden_CH, cast_VH, bias_V).to(accumulation_dtype(self.shard.dtype)))


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
        words = len(weight_VH)
        local_T = targets_T - head.shard.start
        elsewhere_T = (local_T < 0) | (local_T >= words)
        index_T1 = local_T.clamp(0, words - 1).unsqueeze(1)
        column_V = torch.arange(words, device=hidden_TH.device)
        # Rows: the largest logit, and the largest of the words before the target.
        tops_2T = hidden_TH.new_empty(2, len(hidden_TH), dtype=accumulation_dtype(head.shard.dtype))
        # Rows: sums of e = exp(logit - top), e (logit - top), e^2 and the logits; the target's logit, on its rank.
        sums_5T = tops_2T.new_empty(5, len(hidden_TH))
        cast_VH = weight_VH.to(head.shard.dtype)
        for rows in chunks(len(hidden_TH), TOKENS):
            logits_TV = head.logits(hidden_TH[rows], cast_VH, bias_V)
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
        dist.all_reduce(tops_2T, dist.ReduceOp.MAX, head.shard.group)
        top_T, before_T = tops_2T
        # From this rank's top to that of all: e becomes e exp(down), and logit - top becomes logit - top + down.
        down_T = own_top_T - top_T
        sums_5T[1] += down_T * sums_5T[0]
        sums_5T[:2] *= down_T.exp()
        sums_5T[2] *= (2 * down_T).exp()
        sums_5T[4].masked_fill_(elsewhere_T, 0)
        dist.all_reduce(sums_5T, group=head.shard.group)
        e_T, e_logit_T, e_squared_T, logit_T, target_T = sums_5T
        log_e_T = e_T.log()
        log_z_T = top_T + log_e_T
        entropy_T = log_e_T - e_logit_T / e_T
        scores = TokenScores(
            target_T - top_T - log_e_T,
            entropy_T,
            e_squared_T.log() - 2 * log_e_T,
            logit_T / head.shard.words,
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
        found = HeadGradients(hidden_TH, weight_VH, bias_V, ctx.needs_input_grad[:3], head.shard.layout)
        cast_VH = weight_VH.to(head.shard.dtype)
        for rows in chunks(len(hidden_TH), TOKENS):
            logits_TV = head.logits(hidden_TH[rows], cast_VH, bias_V)
            log_p_TV = logits_TV - log_z_T[rows, None]
            weighted_TV = of_log_p_T[rows, None] + of_entropy_T[rows, None] * (log_p_TV + entropy_T[rows, None])
            block_TV = weighted_TV.mul_(log_p_TV.exp_()).neg_().scatter_add_(1, index_T1[rows], at_target_T1[rows])
            rounded_TV = head.transform.backward(logits_TV, block_TV).to(cast_VH.dtype)
            del logits_TV, log_p_TV, weighted_TV, block_TV
            found.add(rows, hidden_TH, cast_VH, rounded_TV)
            del rounded_TV
        found.sum_hidden(head.shard.group)
        of_weight = None if found.weight is None else found.weight.to(weight_VH.dtype)
        of_bias = None if found.bias is None else found.bias.to(weight_VH.dtype)
        return found.hidden, of_weight, of_bias, None, None


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
        check_head(weight, range(self.start, self.stop), self.words)
        head = _Head(HeadShard(self.start, self.words, self.group, product_dtype(hidden)), self.transform)
        ignored = targets == ignore_index
        targets_T = targets.masked_fill(ignored, 0).flatten()
        with torch.autocast(hidden.device.type, enabled=False):
            found = _scores(hidden.flatten(0, -2), weight, bias, targets_T, head)
        return TokenScores(*(each.view(targets.shape).masked_fill(ignored, 0) for each in found))
