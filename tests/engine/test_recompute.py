"""``ds_npu.recompute`` in DeepSpeed's engine: losses and weights of a run with it are those without, to the bit."""

from __future__ import annotations

import gradient_rule as rule
import pytest
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
from adapted_models import ATTENTION, MLP, adapted
from memory_rule import DROPS, WORLDS, same
from ranks import run_on_ranks

RECOMPUTE: dict[str, dict[str, object]] = {
    "all": {"layers": "all"},
    "uniform": {"layers": 2, "method": "uniform"},
    "block": {"layers": 1, "method": "block", "norm": True, "activation_function": True},
    "outputs": {"norm": True, "activation_function": True},
    "parts": {"attention_core": True, "norm": True, "activation_function": True},
    "modules": {"modules": ["**.mlp", "**.self_attn"]},
    "kept": {"layers": "all", "keep": ["matmul", "attention"]},
    "matmul": {"modules": ["**.mlp", "**.*attn*"], "keep": ["matmul"]},
}
VARIANTS: dict[str, dict[str, object]] = {name: {"recompute": each} for name, each in RECOMPUTE.items()}
STAGES = (0, 1, 2, 3)
CORNERS = [
    ("tensor 2", "gpt2", (0, 3)),
    ("sequence parallel", "llama", (1, 3)),
    ("context 2", "llama", (0, 3)),
    ("expert 2", "qwen3_moe", (1, 3)),
    ("data 2", "llama", (2, 3)),
]
CASES = [(world, family, STAGES) for world in WORLDS for family in ("llama", "gpt2", "qwen3_moe")]


def each_stage(family: str, parallel: dict[str, object], stages: tuple[int, ...]) -> None:
    rule.without_extension()
    changes = DROPS.get(family, {})
    variants = {name: each for name, each in VARIANTS.items() if family != "gpt2" or name != "modules"}
    for stage in stages:
        same(lambda: tiny_models.tiny(family, torch.float32, **changes), stage, {"parallel": parallel}, variants)


def in_stages(schedules: tuple[str, ...]) -> None:
    """Pipelines, some of which leave weight gradients for later; ZeRO 3 does not go with them."""
    rule.without_extension()
    for schedule in schedules:
        for stage in (0, 1, 2):
            section = {"parallel": {"pipeline": 2}, "pipeline": {"schedule": schedule}}
            same(lambda: tiny_models.tiny("llama", torch.float32, num_hidden_layers=5), stage, section, VARIANTS)


@pytest.mark.slow
@pytest.mark.parametrize("schedules", [("1f1b", "zb_h1"), ("zb_v", "dualpipe_v")], ids=str)
def test_in_pipeline_stages(schedules):
    run_on_ranks(2, in_stages, schedules, deadline_s=900.0)


@pytest.mark.slow
@pytest.mark.matrix(corners=len(CORNERS), drawn=1)
@pytest.mark.parametrize(("world", "family", "stages"), [*CORNERS, *CASES], ids=str)
def test_a_run_is_that_without_to_the_bit(world, family, stages):
    ranks, parallel = WORLDS[world]
    if "expert" in parallel and family != "qwen3_moe":
        pytest.skip("without experts")
    run_on_ranks(ranks, each_stage, family, parallel, stages, deadline_s=900.0)


def with_sinks() -> None:
    """The attention function reads a parameter of its module, of which each tensor rank has a shard."""
    rule.without_extension()
    for stage in (0, 3):
        core = {"attention core": {"recompute": {"attention_core": True}}}
        same(lambda: tiny_models.tiny("gpt_oss", torch.float32), stage, {"parallel": {"tensor": 2}}, core)


@pytest.mark.slow
def test_attention_with_sinks():
    run_on_ranks(2, with_sinks)


def with_adapters() -> None:
    rule.without_extension()
    for stage in (0, 3):
        same(lambda: adapted("llama", ATTENTION + MLP, lora_dropout=0.2).float(), stage, {}, VARIANTS)


@pytest.mark.slow
def test_adapters_beside_frozen_weights():
    """ZeRO-3 keeps no frozen weight gathered."""
    run_on_ranks(2, with_adapters)


def beside_transformers_own() -> None:
    import deepspeed

    for recompute in ({"layers": "all"}, {"norm": True}):
        model = tiny_models.tiny("llama", torch.float32)
        config = tensor_rule.config(0, torch.float32, {"recompute": recompute})
        model.gradient_checkpointing_enable()
        with pytest.raises(ValueError, match=r"ds_npu\.recompute: gradient checkpointing of .* is on"):
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        model.gradient_checkpointing_disable()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        # The Trainer enables it behind initialize.
        model.gradient_checkpointing_enable()
        ids = tensor_rule.batches(1)
        with pytest.raises(ValueError, match=r"ds_npu\.recompute: gradient checkpointing of .* is on"):
            engine(input_ids=ids, labels=ids)


def test_transformers_gradient_checkpointing_is_refused():
    run_on_ranks(1, beside_transformers_own)
