"""ms-swift by its own command line, with only ds_config.json changed: refused before the first step.

Its own data loaders give every rank other samples, tensor and context ranks as well. In its own environment
(``make clients-env``), with the transformers, accelerate, PEFT and TRL that it pins.
"""

from __future__ import annotations

import client_runs
import pytest

pytestmark = client_runs.ONLY_EXHAUSTIVE
NAME = "ms_swift"
COMMANDS = {"pt": ["pt"], "sft": ["sft"], "dpo": ["rlhf", "--rlhf_type", "dpo"]}
USUAL = {
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
    "dataloader_num_workers": 0,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.001,
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0,
    "max_steps": 4,
    "logging_steps": 1,
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "report_to": "none",
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


def test_one_process_trains_and_saves(inputs, tmp_path):
    saved = train(inputs, tmp_path, "sft", "full", None)
    assert {"loss", "eval_loss"} <= client_runs.logged(saved).keys()
    client_runs.loads_in_plain_transformers(NAME, saved)


@pytest.mark.parametrize("name", ["tensor", "context"])
def test_ranks_that_were_given_other_samples_are_refused(name, inputs, tmp_path):
    with pytest.raises(AssertionError, match="its ranks were given different batches"):
        train(inputs, tmp_path, "sft", "full", client_runs.PARALLEL[name])
    assert not [*tmp_path.rglob("checkpoint-*")]
