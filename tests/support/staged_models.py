"""Tiny models cut into pipeline stages, without an engine, whose stages one process runs one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tiny_models
import torch
from torch import nn

from ds_npu.features.pipeline.stages import StageModules, cut_into_stages, run_stage, stages_of
from ds_npu.models.globs import plan_for

SAMPLES, LENGTH = 2, 9


def stageable(family: str, blocks: int = 3, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A tiny model of ``blocks`` blocks without what stages do not have: tied weights, a loss of all layers."""
    changes: dict[str, object] = {"n_layer" if family == "gpt2" else "num_hidden_layers": blocks}
    if family in ("mixtral", "qwen3_moe"):
        changes["output_router_logits"] = False
    return tiny_models.tiny(family, dtype, tie_word_embeddings=False, **changes)


def cut(models: Sequence[nn.Module], split: int | Sequence[int]) -> list[StageModules]:
    """Cut each of the ``models``, which are alike, into another stage."""
    plan = plan_for(models[0], {})
    found = stages_of(plan, split)
    for model, own in zip(models, found, strict=True):
        cut_into_stages(model, plan, own)
    return found


def chained(models: Sequence[nn.Module], stages: Sequence[StageModules], **batch: Any) -> Any:
    """What the last of the stages ``models`` returns."""
    x = None
    for model, own in zip(models, stages, strict=True):
        x = run_stage(model, own.stage, x, **batch)
    return x


def labelled() -> dict[str, torch.Tensor]:
    ids = tiny_models.tokens(SAMPLES, LENGTH)
    return {"input_ids": ids, "labels": ids}
