"""The models and batches of golden cases."""

from __future__ import annotations

import tiny_models
import torch
from golden_cases import Case
from gradient_rule import ACCUMULATION, MICRO
from torch import nn

STAGED = 4
"""Samples of a batch that stages cut into micro-batches."""
IGNORED = -100
OWN_SCHEDULE = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
"""A file of ``pipeline.schedule``: two ranks, two micro-batches."""


def model_of(case: Case) -> nn.Module:
    model = tiny_models.tiny(case.family, torch.float32, **case.changes)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model.to(getattr(torch, case.dtype)).train()


def samples(case: Case) -> int:
    return STAGED if "pipeline" in case.section.get("parallel", {}) else MICRO


def batches(case: Case, step: int, dp: int, rank: int) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of data rank ``rank`` in a step."""
    if case.batch == "few":
        ids = few_tokens(case, step, dp)[:, rank]
    else:
        ids = tiny_models.tokens(ACCUMULATION * dp * samples(case), case.length)
        ids = ids.view(ACCUMULATION, dp, samples(case), case.length)[:, rank]
    return [labelled(each, case.batch == "padded") for each in ids]


def few_tokens(case: Case, step: int, dp: int) -> torch.Tensor:
    """[ACCUMULATION, dp, samples, length]: few different ones in each step, so that experts have uneven loads."""
    made = torch.Generator().manual_seed(step // 2)
    few = torch.randint(3, 60, (4,), generator=made)
    return few[
        torch.randint(0, 4, (ACCUMULATION, dp, samples(case), case.length), generator=made.manual_seed(100 + step))
    ]


def labelled(ids: torch.Tensor, padded: bool) -> dict[str, torch.Tensor]:
    """A batch; ``padded``: its samples have few, many or no labels, and one has padding."""
    if not padded:
        return {"input_ids": ids, "labels": ids}
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, :4] = IGNORED
    labels[2:3] = IGNORED
    mask[1, 7:], labels[1, 7:] = 0, IGNORED
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}
