"""LLaMA-Factory by its own command line: pretrain, SFT and DPO, full and LoRA, with only ds_config.json changed.

In its own environment (``make clients-env``), with the transformers, accelerate, PEFT and TRL that it pins.
"""

from __future__ import annotations

import json

import client_runs
import pytest

pytestmark = client_runs.ONLY_EXHAUSTIVE
NAME = "llama_factory"
USUAL = client_runs.TRAINING | {
    "template": "qwen",
    "cutoff_len": 64,
    "do_train": True,
    "overwrite_cache": True,
    "overwrite_output_dir": True,
    "val_size": 8,
    "use_cpu": True,
}
LORA = {"lora_rank": 4, "lora_target": "all"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return client_runs.write_inputs(NAME, tmp_path_factory.mktemp("inputs"))


def train(inputs, folder, stage, kind, parallel):
    """``llamafactory-cli train x.yaml`` on one process, or two ranks with ``parallel``; where it wrote."""
    out = folder / "out"
    config = client_runs.write_deepspeed_config(folder, parallel)
    given = USUAL | {"stage": stage, "finetuning_type": kind, "dataset": f"tiny_{stage}", "output_dir": str(out)}
    given |= {"model_name_or_path": str(inputs / "model"), "dataset_dir": str(inputs / "data")}
    given |= {"deepspeed": str(config)} | (LORA if kind == "lora" else {})
    # JSON is YAML.
    recipe = folder / "x.yaml"
    recipe.write_text(json.dumps(given))
    ranks = "1" if parallel is None else "2"
    client_runs.run_in(NAME, ["llamafactory-cli", "train", str(recipe)], FORCE_TORCHRUN="1", NPROC_PER_NODE=ranks)
    return out


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("stage", ["sft", "dpo", "pt"])
def test_every_stage_is_that_of_one_process(stage, kind, inputs, tmp_path):
    def run(name, parallel):
        return train(inputs, tmp_path / name, stage, kind, parallel)

    for out in client_runs.as_one_process(run, adapter=kind == "lora"):
        whole, adapter = (out, None) if kind == "full" else (inputs / "model", out)
        client_runs.loads_in_plain_transformers(NAME, whole, adapter)
