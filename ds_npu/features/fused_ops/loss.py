"""The loss of a causal language model, its cross-entropy in one kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ds_npu.features.fused_ops.equivalence import computes_the_same, isolated_on_cpu, random
from ds_npu.features.fused_ops.fusion_result import FusionResult
from ds_npu.models import names
from ds_npu.models.logits import IGNORED_LABEL
from ds_npu.models.plan import ModelPlan
from ds_npu.ops.cross_entropy import cross_entropy
from ds_npu.parallel.forward_wraps import disable_tracing

WORDS = 7


def fuse_loss(model: nn.Module, plan: ModelPlan) -> Iterator[FusionResult]:
    """Put ``ops.cross_entropy`` into the loss function of the model around the head of ``plan``."""
    if plan.head is None:
        return
    found = ((name, model.get_submodule(name)) for name in names.ancestors(plan.head))
    for name, owner in found:
        if any("loss_function" in vars(kind) for kind in type(owner).__mro__):
            yield FusionResult(name, _fuse(owner) or "")
            return
    yield FusionResult("", f"{type(model).__name__} has no loss_function: its loss is the script's")


def _fuse(owner: Any) -> str | None:
    """Why the loss of ``owner`` was left as it is."""
    if "_loss_function" in vars(owner):
        return "its loss_function has been set already (with tensor parallelism, to the vocabulary-parallel one)"
    theirs = owner.loss_function
    with isolated_on_cpu() as generator:
        logits = random(generator, 2, 5, WORDS)
        labels = torch.randint(0, WORDS, (2, 5), generator=generator)
        labels[0, 1] = IGNORED_LABEL
        asked: list[dict[str, Any]] = [
            {"labels": labels},
            {"labels": labels, "num_items_in_batch": torch.tensor(3)},
            {"labels": None, "shift_labels": labels},
        ]
        for options in asked:
            each = {"vocab_size": WORDS, **options}
            if not computes_the_same(
                lambda x, e=each: theirs(logits=x, **e), lambda x, e=each: causal_lm_loss(x, **e), logits
            ):
                return f"{type(owner).__name__} computes another loss than transformers' ForCausalLMLoss"
    owner.loss_function = causal_lm_loss
    return None


@disable_tracing
def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = IGNORED_LABEL,
    shift_labels: torch.Tensor | None = None,
    **_others: Any,
) -> torch.Tensor:
    """Mean over the tokens that count, or their sum divided by ``num_items_in_batch``, in float32.

    ``logits`` [B, S, V]; ``labels`` [B, S], of which token s predicts number s + 1, or ``shift_labels`` [B, S], of
    which it predicts number s. Raises ValueError where there are neither.
    Source: transformers.loss.loss_utils.ForCausalLMLoss (5.23).
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("neither labels nor shift_labels were given")
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets_T = shift_labels.reshape(-1).to(logits.device)
    total = cross_entropy(logits.reshape(-1, vocab_size), targets_T, ignore_index).sum()
    if num_items_in_batch is None:
        return total / (targets_T != ignore_index).sum()
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch
