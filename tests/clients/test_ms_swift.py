"""ms-swift by its own command line, with only ds_config.json changed, against one process.

In its own environment (``make clients-env``), with the transformers, accelerate, PEFT and TRL that it pins.
"""

from __future__ import annotations

import client_runs
import pytest

pytestmark = client_runs.ONLY_EXHAUSTIVE
NAME = "ms_swift"
COMMANDS = {"pt": ["pt"], "sft": ["sft"], "dpo": ["rlhf", "--rlhf_type", "dpo"]}
USUAL = client_runs.TRAINING | {
    "model_type": "llama",
    "template": "dummy",
    "torch_dtype": "float32",
    # float32 alone means fp16 to ms-swift.
    "fp16": "false",
    "bf16": "false",
    "attn_impl": "sdpa",
    "max_length": 64,
    "split_dataset_ratio": 0.25,
    "load_from_cache_file": "false",
    "warmup_ratio": 0,
    "add_version": "false",
    "use_hf": "true",
    "use_cpu": "true",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return client_runs.write_inputs(NAME, tmp_path_factory.mktemp("inputs"))


def train(inputs, folder, stage, kind, parallel):
    """``swift sft`` and its like on one process, or two ranks with ``parallel``; the last checkpoint."""
    out = folder / "out"
    given = USUAL | {"model": inputs / "model", "dataset": inputs / "data" / f"swift_{stage}.json", "output_dir": out}
    given |= {"tuner_type": kind, "deepspeed": client_runs.write_deepspeed_config(folder, parallel)}
    ranks = "1" if parallel is None else "2"
    client_runs.run_in(NAME, ["swift", *COMMANDS[stage], *client_runs.quoted(given)], NPROC_PER_NODE=ranks)
    return out / "checkpoint-4"


@pytest.mark.parametrize("stage", COMMANDS)
def test_every_stage_is_that_of_one_process(stage, inputs, tmp_path):
    def run(name, parallel):
        return train(inputs, tmp_path / name, stage, "full", parallel)

    for out in client_runs.as_one_process(run):
        client_runs.loads_in_plain_transformers(NAME, out)
