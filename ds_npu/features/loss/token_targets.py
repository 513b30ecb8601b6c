"""The labels of a Hugging Face model's loss where the batch is divided: which loss it is, how many tokens count."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ds_npu.features.loss.model_loss import users_loss
from ds_npu.models.hugging_face_model import HuggingFaceModel, transformers_module
from ds_npu.models.logits import IGNORED_LABEL, LABEL_ARGUMENTS
from ds_npu.parallel.tensor.cross_entropy import next_token_targets

SHIFTS = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False, "ForTokenClassification": False}
"""Losses of transformers that are a mean over tokens: whether token s predicts token s + 1, or itself."""
COUNT = "num_items_in_batch"
FUSED_HEAD = "fused_lm_head"
"""The argument with which TRL's trainers ask a model for the scores of its labelled tokens in place of logits."""
LOG_PROBS, LABEL_MASK = "log_probs", "label_mask"
"""Two of these scores: the log-probability of each label, and whether there is a label."""


def shifts(model: HuggingFaceModel, key: str, remedy: str) -> bool | None:
    """Whether the loss of ``model`` compares each token's logits with the next token; None for a model without a loss.

    Raises ValueError, which names the ``key`` that divides the loss and the ``remedy``, for a loss that is no mean over
    tokens, or not known.
    """
    if model.loss_type is None and "labels" not in inspect.signature(model.forward).parameters:
        return None
    # As transformers chooses it (modeling_utils.py, PreTrainedModel.loss_function).
    kind = model.loss_type or "ForCausalLM"
    mapping: Mapping[str, Callable[..., torch.Tensor]] = transformers_module("loss.loss_utils").LOSS_MAPPING
    name = mapping[kind].__name__ if kind in mapping else str(kind)
    own = users_loss(model)
    # ds_npu.parallel.VocabParallelLoss, which a script may have set, means the same.
    if name not in SHIFTS or (own is not None and not own.__module__.startswith("ds_npu.")):
        raise ValueError(
            f"{type(model).__name__} has the loss {name if own is None else own}: over the ranks of "
            f"{key} only {', '.join(SHIFTS)} of transformers can be divided, which are means over "
            f"tokens. What to do: {remedy}"
        )
    return SHIFTS[name]


def asks_for_scores(given: Mapping[str, Any]) -> bool:
    """Whether a forward with the arguments ``given`` returns scores in place of logits."""
    return bool(given.get(FUSED_HEAD)) and any(given.get(name) is not None for name in LABEL_ARGUMENTS)


class Targets:
    """The label that each token of a batch is to predict, [B, S], and how many tokens have one."""

    def __init__(self, given: Mapping[str, Any], shifted: bool) -> None:
        """``given``: the arguments of a forward; ``shifted``: whether its ``labels`` are those of the next token."""
        self.ignored: int = given.get("ignore_index", IGNORED_LABEL)
        self.tokens: torch.Tensor | None = given.get("shift_labels")
        labels: torch.Tensor | None = given.get("labels")
        if self.tokens is None and labels is not None:
            # Shifted before the sequence is sharded: a shard's last token predicts the first of another rank's.
            self.tokens = next_token_targets(labels, None, self.ignored) if shifted else labels
        self.count: torch.Tensor | int | None = given.get(COUNT)
        if self.tokens is not None and self.count is None:
            self.count = (self.tokens != self.ignored).sum()
