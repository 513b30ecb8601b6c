"""Engines of tiny models in float32 with AdamW, and their steps, for tests of what is recorded of a run."""

from __future__ import annotations

import deepspeed
import gradient_rule as rule
import tiny_models
import torch
from torch import nn


def engine_of(model: nn.Module, section: dict, stage: int = 0, **more: object):
    rule.without_extension()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "ds_npu": section,
        **more,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def step(engine, ids: torch.Tensor) -> None:
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


def llama() -> nn.Module:
    return tiny_models.tiny("llama", torch.float32)
