"""Parallelism that a script asks transformers or accelerate for, beside ds_npu's section: refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import gradient_rule as rule
import pytest
import tiny_models
import torch
import transformers
from ranks import run_on_ranks

SECTIONS = {"tensor 2": {"tensor": 2}, "context 2": {"context": 2}}


def config(parallel: dict[str, int]) -> dict[str, object]:
    return rule.config(1, torch.float32, {}) | {"ds_npu": {"parallel": parallel}}


def loaded_in_parts(folder: str) -> None:
    import deepspeed

    rule.without_extension()
    transformers.logging.set_verbosity_error()
    for asked, parallel in SECTIONS.items():
        for options in ({"tp_plan": "auto"}, {"distributed_config": {"tp_size": 2}}):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
            with pytest.raises(ValueError) as caught:
                deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(parallel))
            said = str(caught.value)
            assert said.startswith("LlamaForCausalLM.from_pretrained was given distributed_config= or tp_plan=")
            assert f"(tensor 2), and ds_npu.parallel asks for {asked}: " in said and "What to do: leave " in said


def test_a_model_that_transformers_has_sharded(tmp_path: Path):
    tiny_models.tiny("llama", torch.float32).save_pretrained(tmp_path)
    run_on_ranks(2, loaded_in_parts, str(tmp_path))


def with_parallelism_config() -> None:
    import accelerate
    from accelerate.parallelism_config import ParallelismConfig

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    for asked, parallel in SECTIONS.items():
        for size in ("tp_size", "sp_size", "dp_shard_size"):
            accelerate.state.AcceleratorState._reset_state(True)
            accelerate.PartialState(cpu=True)
            plugin = accelerate.utils.DeepSpeedPlugin(hf_ds_config=config(parallel))
            with pytest.raises(ValueError) as caught:
                accelerate.Accelerator(deepspeed_plugin=plugin, parallelism_config=ParallelismConfig(**{size: 2}))
            said = str(caught.value)
            assert said.startswith(f"accelerate's ParallelismConfig asks for {size} 2 (in the script, ")
            assert f"ds_npu.parallel for {asked}: " in said and "What to do: leave the ParallelismConfig" in said
    # One that asks for nothing, and none, are both right.
    for given in (ParallelismConfig(), None):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.PartialState(cpu=True)
        plugin = accelerate.utils.DeepSpeedPlugin(hf_ds_config=config({"tensor": 2}))
        accelerate.Accelerator(deepspeed_plugin=plugin, parallelism_config=given)


def test_accelerates_parallelism_config():
    run_on_ranks(2, with_parallelism_config)
