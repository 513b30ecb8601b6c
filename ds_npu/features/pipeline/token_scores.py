"""Scores of tokens that a model in stages returns in training, for trainers that add them up to their loss.

TRL's SFTTrainer calls the model with ``fused_lm_head=True`` and makes the loss of the log-probabilities [B, S] itself:
minus their sum over the labelled tokens, times a number. Backwards of micro-batches begin before that, with the loss
that the forward also returns, the same sum times another number: so the gradients are right up to one factor,
which the gradient of any one log-probability tells.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from ds_npu.features.loss.token_targets import LABEL_MASK, LOG_PROBS
from ds_npu.ops.autograd import Context, applied


class _OneLoss(Context):
    items: torch.Tensor | int


class _LogProbs(torch.autograd.Function):
    """``log_probs``, whose gradient is that of ``loss``: -(their sum where ``counts``) / ``items``."""

    @staticmethod
    def forward(
        ctx: _OneLoss, loss: torch.Tensor, log_probs: torch.Tensor, counts: torch.Tensor, items: torch.Tensor | int
    ) -> torch.Tensor:
        ctx.items = items
        ctx.save_for_backward(counts)
        return log_probs.view_as(log_probs)

    @staticmethod
    def backward(ctx: _OneLoss, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,), (counts,) = gradients, ctx.saved_tensors
        # The host waits, once in a batch: it must know whether the loss is right before the optimizer's step.
        of_labelled = gradient[counts]
        factor = of_labelled[0] if len(of_labelled) else gradient.new_zeros(())
        if not torch.equal(of_labelled, factor.expand_as(of_labelled)):
            raise ValueError(_refusal("weighs the log-probabilities of tokens differently (loss_type dft, DPO, GRPO)"))
        return -factor * ctx.items, None, None, None


class _NotDifferentiated(torch.autograd.Function):
    """``score``, which a loss must not be made of; ``loss``: a tensor with a graph."""

    @staticmethod
    def forward(ctx: Context, loss: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
        return score.view_as(score)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise ValueError(_refusal("is made of other scores than log-probabilities (entropies)"))


_log_probs = applied(_LogProbs, _LogProbs.forward)
_not_differentiated = applied(_NotDifferentiated, _NotDifferentiated.forward)


def _refusal(what: str) -> str:
    return (
        f"the loss {what}: in pipeline stages backwards of micro-batches begin before the loss of a batch is known, so "
        "it must be minus the sum of the log-probabilities of the labelled tokens, times a number (TRL's SFTTrainer, "
        "loss_type nll). What to do: that one, or ds_npu.parallel.pipeline 1"
    )


def with_graph(out: MutableMapping[str, Any], loss: torch.Tensor, items: torch.Tensor | int) -> None:
    """Give the scores in ``out``, of a whole batch and without graphs, the graph of ``loss``, a leaf.

    ``loss``: minus the sum of the log-probabilities where ``label_mask`` is true, divided by ``items``; its gradients
    are there already.
    """
    for name in [name for name, each in out.items() if isinstance(each, torch.Tensor) and each.is_floating_point()]:
        if name == LOG_PROBS:
            out[name] = _log_probs(loss, out[name], out[LABEL_MASK], items)
        elif name != "loss":
            out[name] = _not_differentiated(loss, out[name])
    # A copy: the caller may scale it in place.
    out["loss"] = loss * 1
