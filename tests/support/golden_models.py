"""The models and batches of golden cases."""

from __future__ import annotations

from typing import Any

import gradient_rule
import peft
import tiny_models
import torch
from deepspeed.pipe import PipelineModule
from golden_cases import Case
from gradient_rule import ACCUMULATION, MICRO
from torch import nn

STAGED = 4
"""Samples of a batch that stages cut into micro-batches."""
IGNORED = -100
OWN_SCHEDULE = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
"""A file of ``pipeline.schedule``: two ranks, two micro-batches."""


def model_of(case: Case) -> nn.Module:
    if case.family == "PipelineModule":
        return PipelineModule(gradient_rule.layers(), num_stages=2, loss_fn=gradient_rule.token_loss)
    model = tiny_models.tiny(case.family, torch.float32, **case.changes)
    if case.adapters:
        torch.manual_seed(7)
        model = peft.get_peft_model(model, peft.LoraConfig(**case.adapters))
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model.to(getattr(torch, case.dtype)).train()


def samples(case: Case) -> int:
    is_cut = "pipeline" in case.section.get("parallel", {}) and case.family != "PipelineModule"
    return STAGED if is_cut else MICRO


def batches(case: Case, step: int, topology: Any) -> list[Any]:
    """This rank's micro-batches of a step."""
    if case.family == "PipelineModule":
        return gradient_rule.my_batches(topology)
    dp, rank = topology.size("dp"), topology.rank("dp")
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
