"""The loss of a causal language model with its cross-entropy in one kernel."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_npu.features.declaration import Change
from ds_npu.features.fused_ops.fusion_result import FusionResult
from ds_npu.features.loss.model_loss import HasLossFunction, LossFunction, LossLevel, own_loss, users_loss, wrap_loss
from ds_npu.features.modules.equivalence import computes_the_same, isolated_on_cpu, random_input
from ds_npu.models import names
from ds_npu.models.logits import IGNORED_LABEL
from ds_npu.models.plan import ModelPlan
from ds_npu.ops.layers import cross_entropy
from ds_npu.parallel.runtime.forward_wraps import disable_tracing
from ds_npu.parallel.tensor.cross_entropy import mean_loss, next_token_targets

WORDS = 7
"""The number of words in the losses that are compared."""
WHOLE_LOGITS = (
    "its logits are whole: trained on labels, tensor ranks keep them sharded and compute the vocabulary-parallel loss"
)
"""When the operator computes the loss; the text does not depend on the model's other features."""


def fuse_loss(model: nn.Module, plan: ModelPlan) -> Iterator[FusionResult]:
    """Yield whether ``ops.cross_entropy`` goes into the loss of the model around the head of ``plan``, or why not."""
    if plan.head is None:
        return
    found = ((name, model.get_submodule(name)) for name in names.ancestors(plan.head))
    for name, owner in found:
        if "loss_function" in dir(type(owner)) and isinstance(owner, HasLossFunction):
            if reason := _why_not(owner):
                yield FusionResult(name, reason)
                return
            make = partial(wrap_loss, owner, _fused, LossLevel.OPERATOR, "fused_ops.cross_entropy")
            link = Change("links", name, "cross_entropy", make, LossLevel.OPERATOR)
            yield FusionResult(name, condition=WHOLE_LOGITS, changes=(link,))
            return
    yield FusionResult("", f"{type(model).__name__} has no loss_function: its loss is the script's")


def _why_not(owner: HasLossFunction) -> str | None:
    """Why the loss of ``owner`` is left as it is; None where it computes what ``causal_lm_loss`` does."""
    if users_loss(owner) is not None:
        return "its loss_function has been set already"
    if not _computes_the_same(own_loss(owner)):
        return f"{type(owner).__name__} computes another loss than transformers' ForCausalLMLoss"
    return None


def _fused(_own: LossFunction, *args: Any, **kwargs: Any) -> torch.Tensor:
    return causal_lm_loss(*args, **kwargs)


def _computes_the_same(theirs: LossFunction) -> bool:
    """Whether ``theirs`` computes what ``causal_lm_loss`` does."""
    with isolated_on_cpu() as generator:
        logits = random_input(generator, 2, 5, WORDS)
        labels = torch.randint(0, WORDS, (2, 5), generator=generator)
        labels[0, 1] = IGNORED_LABEL
        calls: list[dict[str, torch.Tensor | None]] = [
            {"labels": labels},
            {"labels": labels, "num_items_in_batch": torch.tensor(3)},
            {"labels": None, "shift_labels": labels},
        ]
        each_call = ({"vocab_size": WORDS, **options} for options in calls)
        return all(
            computes_the_same(lambda x, e=each: theirs(logits=x, **e), lambda x, e=each: causal_lm_loss(x, **e), logits)
            for each in each_call
        )


@disable_tracing
def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = IGNORED_LABEL,
    shift_labels: torch.Tensor | None = None,
    **_others: object,
) -> torch.Tensor:
    """The mean cross-entropy of the tokens with a label, or their sum divided by ``num_items_in_batch``, in float32.

    ``logits`` [B, S, V]; ``labels`` [B, S] (int64), of which token s predicts number s + 1, or ``shift_labels`` [B, S],
    of which it predicts number s. Raises ValueError where neither is given.
    Source: transformers.loss.loss_utils.ForCausalLMLoss (5.23).
    """
    targets_T = next_token_targets(labels, shift_labels, ignore_index).reshape(-1).to(logits.device)
    total = cross_entropy(logits.reshape(-1, vocab_size), targets_T, ignore_index).sum()
    return mean_loss(total, targets_T, num_items_in_batch, ignore_index)
