"""Optimizers that read whole weights are refused on every rank where an axis shards what they read, and only there."""

from __future__ import annotations

import deepspeed
import gradient_rule as rule
import pytest
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
from ranks import run_on_ranks
from whole_weight_optimizers import Lamb, Prodigy

MUON = {"type": "Muon", "params": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.0, "torch_adam": True}}


def initialize(family: str, stage: int, parallel: dict[str, object], optimizer: object) -> object:
    model = tiny_models.tiny(family, torch.float32)
    config = tensor_rule.config(stage, torch.float32, {"parallel": parallel})
    config |= {"zero_allow_untested_optimizer": True}
    given = {}
    if isinstance(optimizer, dict):
        config["optimizer"] = optimizer
        given["model_parameters"] = model.parameters()
    else:
        config.pop("optimizer", None)
        given["optimizer"] = optimizer(model.parameters())
    return deepspeed.initialize(model=model, config=config, **given)[0]


def matrices_by_torch(weights) -> torch.optim.Optimizer:
    """torch's own Muon, which knows nothing of ranks."""
    return torch.optim.Muon([each for each in weights if each.dim() == 2])


def refused(cases: list[tuple[str, int, dict[str, object], str]]) -> None:
    rule.without_extension()
    every = {"torch_muon": matrices_by_torch, "lamb": Lamb, "adafactor": torch.optim.Adafactor, "prodigy": Prodigy}
    for family, stage, parallel, names in cases:
        key = f"ds_npu.parallel.{list(parallel)[-1]}"
        for name in names.split():
            with pytest.raises(ValueError, match=f"^{key}: .* gives other numbers for parts than for the whole"):
                initialize(family, stage, parallel, every[name])


def accepted(cases: list[tuple[str, int, dict[str, object], str]]) -> None:
    rule.without_extension()
    every = {"muon": MUON, "lamb": Lamb, "adafactor": torch.optim.Adafactor, "adamw": torch.optim.AdamW}
    for family, stage, parallel, names in cases:
        for name in names.split():
            engine = initialize(family, stage, parallel, every[name])
            ids = tensor_rule.batches(rule.MICRO)
            for _ in range(rule.ACCUMULATION):
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()


def test_over_axes_that_shard_what_they_read():
    cases = [
        ("llama", 1, {"tensor": 2}, "lamb adafactor torch_muon"),
        ("llama", 0, {"tensor": 2}, "lamb"),
        ("llama", 3, {"tensor": 2}, "adafactor"),
        ("qwen3_moe", 1, {"expert_tensor": 2}, "lamb"),
        ("llama", 1, {"pipeline": 2}, "prodigy"),
    ]
    run_on_ranks(2, refused, cases)


@pytest.mark.slow
def test_over_axes_that_leave_weights_whole():
    cases = [
        ("llama", 0, {"context": 2}, "muon lamb adafactor"),
        ("llama", 1, {"tensor": 2}, "adamw muon"),
        ("llama", 1, {}, "lamb"),
    ]
    run_on_ranks(2, accepted, cases)
