"""The loss of a batch from those of its micro-batches, which add up to it.

The loss of transformers' models is a mean over labelled tokens: each micro-batch divides the sum over its tokens by the
number of those of the whole batch, or by the ``num_items_in_batch`` that the caller gives. Losses of other models are
averaged, as DeepSpeed's PipelineEngine does.

TRL's SFTTrainer calls the model with ``fused_lm_head=True`` and makes the loss of the log-probabilities [B, S] itself:
minus their sum over the labelled tokens, times a number. Backwards of micro-batches begin before that, with the loss
that the forward also returns, the same sum times another number: so the gradients are right up to one factor,
which the gradient of any one log-probability tells.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ds_npu.features.loss.model_loss import COUNT, LABEL_MASK, LOG_PROBS, LossFunction, Targets, shifts
from ds_npu.features.pipeline.micro_batches import KEY
from ds_npu.models.hugging_face_model import hugging_face_model
from ds_npu.models.logits import LABEL_ARGUMENTS
from ds_npu.ops.autograd import Context, applied
from ds_npu.parallel.runtime.calls import Keywords
from ds_npu.parallel.runtime.micro_batch import Fact, new_forward, running

Items = torch.Tensor | int
ITEMS: Fact[Items] = Fact()
"""The divisor of the sum over the tokens of a micro-batch."""
REMEDY = f"{KEY} 1, which leaves the batch whole"


def loss_by_items(inner: LossFunction, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Link of a loss: it divides by the ITEMS of the micro-batch, where they are known."""
    items = ITEMS.of(running())
    return inner(*args, **kwargs) if items is None else inner(*args, **{**kwargs, COUNT: items})


@contextmanager
def divided_by(items: Items | None) -> Iterator[None]:
    """Divide the loss of the forward within by ``items``; None: by the model's own divisor."""
    with new_forward() as micro_batch:
        if items is not None:
            ITEMS.set(micro_batch, items)
        yield


class _WithLoss(torch.autograd.Function):
    """Returns ``x``, whose backward also runs the backward of the scalar ``loss``."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, torch.ones_like(ctx.saved_tensors[0])


with_loss = applied(_WithLoss, _WithLoss.forward)
"""Hidden states that leave a stage, with a loss of the stage's own layers (Megatron-LM, moe_utils.py)."""


class BatchLoss:
    """How the losses of the micro-batches of ``model`` add up to the loss of the batch."""

    def __init__(self, model: nn.Module) -> None:
        self._found = hugging_face_model(model)

    def check_labels(self, given: Keywords) -> None:
        """Raise ValueError for a batch to train on whose loss cannot be computed in the last stage."""
        if self._found is not None and all(given.get(name) is None for name in LABEL_ARGUMENTS):
            raise ValueError(
                f"{type(self._found).__name__} is trained and given no labels: in pipeline stages the backward of each "
                "micro-batch begins before the forward of the batch has ended, so its loss must be the model's own. "
                "What to do: give it labels, or ds_npu.parallel.pipeline 1; for its logits, torch.no_grad()"
            )

    def items(self, parts: Sequence[Keywords]) -> Items | None:
        """The divisor of the losses of ``parts``, the arguments of each micro-batch; None: the losses are averaged.

        One part alone is divided as its model does. Raises ValueError for a loss that is no mean over tokens, or not
        known.
        """
        if self._found is None or all(parts[0].get(name) is None for name in LABEL_ARGUMENTS):
            return None
        given: Items | None = parts[0].get(COUNT)
        if given is not None or len(parts) == 1 or self._shifted is None:
            return given
        return sum(self._labels(part) for part in parts)

    def items_of_scores(self, parts: Sequence[Keywords]) -> Items:
        """The divisor of the sum over the tokens of each of ``parts``, for a head that returns scores of tokens."""
        given: Items | None = parts[0].get(COUNT)
        if given is not None:
            return given
        # At least 1, as TRL does for a batch without targets.
        return torch.as_tensor(sum(_count(part, shifted=True) for part in parts)).clamp(min=1)

    def share(self, loss: torch.Tensor, parts: Sequence[Keywords], index: int, items: Items | None) -> torch.Tensor:
        """The part of the batch's loss that comes from ``loss``, a mean over the part ``index`` (a router's loss)."""
        if items is None or self._found is None:
            return loss / len(parts)
        # The product comes first: a quotient of integers would be a float32.
        return loss * self._labels(parts[index]) / items

    @cached_property
    def _shifted(self) -> bool | None:
        return None if self._found is None else shifts(self._found, KEY, REMEDY)

    def _labels(self, part: Keywords) -> Items:
        return _count(part, bool(self._shifted))


def _count(part: Keywords, shifted: bool) -> Items:
    count = Targets({name: each for name, each in part.items() if name != COUNT}, shifted).count
    return 0 if count is None else count


class _OneLoss(Context):
    items: torch.Tensor | int


class _LogProbs(torch.autograd.Function):
    """Returns ``log_probs``, whose backward is that of ``loss``: -(their sum where ``counts``) / ``items``."""

    @staticmethod
    def forward(
        ctx: _OneLoss, loss: torch.Tensor, log_probs: torch.Tensor, counts: torch.Tensor, items: torch.Tensor | int
    ) -> torch.Tensor:
        ctx.items = items
        ctx.save_for_backward(counts)
        return log_probs.view_as(log_probs)

    @staticmethod
    def backward(ctx: _OneLoss, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        (counts,) = ctx.saved_tensors
        # The host waits, once in a batch: it must know whether the loss is right before the optimizer's step.
        of_labelled = gradient[counts]
        factor = of_labelled[0] if len(of_labelled) else gradient.new_zeros(())
        if not torch.equal(of_labelled, factor.expand_as(of_labelled)):
            raise ValueError(_refusal("weighs the log-probabilities of tokens differently (loss_type dft, DPO, GRPO)"))
        return -factor * ctx.items, None, None, None


class _NotDifferentiated(torch.autograd.Function):
    """Returns ``score``, made part of the graph of ``loss``; its backward raises ValueError."""

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
    """Make the scores in ``out``, of a whole batch and without graphs, depend on the leaf ``loss`` in backward.

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
