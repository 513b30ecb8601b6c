"""An engine that the script has destroyed and does not refer to is collected, and its model with it."""

from __future__ import annotations

import gc
import weakref

import deepspeed
import gradient_rule as rule
import pytest
import tiny_models
import torch
from logged_lines import logged_lines
from ranks import run_on_ranks

MEMORY = {"recompute": {"norm": True, "attention_core": True}, "swap": {"activations": ["**.mlp"]}, "chunked_loss": 4}
REPORTS = {"memory_report": True, "watch": {"finite": True, "mfu": True}, "checkpoint": {"asynchronous": True}}
SECTIONS: dict[str, tuple[str, int, dict[str, object]]] = {
    "tensor": ("llama", 1, {"parallel": {"tensor": 2, "sequence_parallel": True}} | MEMORY),
    "ZeRO 3": ("llama", 3, {"fused_ops": {}}),
    "ZeRO 3, experts": ("mixtral", 3, {"parallel": {"expert": 2}} | MEMORY),
    "context": ("llama", 1, {"parallel": {"context": 2}} | MEMORY),
    "context, without ZeRO": ("gemma2", 0, {"parallel": {"context": 2}}),
    "pipeline": ("llama", 1, {"parallel": {"pipeline": 2}}),
    "experts": ("mixtral", 2, {"parallel": {"expert": 2}, "moe": {"overlap": True, "placement_interval": 1}}),
    "reports": ("llama", 1, REPORTS),
}
"""By name: the family, the ZeRO stage and the section."""


def steps(engine, count: int) -> None:
    ids = tiny_models.tokens(2, 16)
    for _ in range(count):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


def is_collected(family: str, stage: int, section: dict[str, object]) -> bool:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "ds_npu": section,
    }
    engine = deepspeed.initialize(model=tiny_models.tiny(family, torch.float32), config=config)[0]
    steps(engine, 2)
    if stage == 3:
        with pytest.raises(IndexError):
            engine(input_ids=torch.full((2, 16), 10**6))
    found = [weakref.ref(engine), weakref.ref(engine.module)]
    engine.destroy()
    del engine
    gc.collect()
    return not any(each() for each in found)


def engine_is_collected(name: str) -> None:
    rule.without_extension()
    assert is_collected(*SECTIONS[name])


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize("name", SECTIONS)
def test_destroyed_engines_are_collected(name):
    run_on_ranks(2, engine_is_collected, name)


def missing_steps_are_said(folder: str) -> None:
    """Not at the end of the process, for which a dump and a profile would keep the engine."""
    rule.without_extension()
    lines = logged_lines()
    section = {"dump": {"steps": [1, 7], "folder": f"{folder}/dump"}}
    section["profile"] = {"steps": [3, 4], "folder": f"{folder}/profile"}
    assert is_collected("llama", 1, section)
    said = sorted(line for line in lines if "never came" in line)
    assert said == [
        "ds_npu.dump.steps: 7 never came: the run ended behind step 1",
        "ds_npu.profile.steps: steps 3 to 4 never came: the run ended behind step 1",
    ], lines


@pytest.mark.slow
def test_what_an_engine_has_not_done_is_said_when_it_is_destroyed(tmp_path):
    run_on_ranks(1, missing_steps_are_said, str(tmp_path))
