"""What ``ds_npu check`` says of a config that the Trainer fills in; the Trainer's and accelerate's own code judges."""

from __future__ import annotations

import copy
import json

import pytest
from accelerate.utils import DeepSpeedPlugin
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from ds_npu.cli.main import main
from ds_npu.config.trainer_traps import ARGUMENTS, FILLED, GATHERED, trainer_traps

GOOD = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "ds_npu": {"parallel": {"tensor": 2}},
}


def without(key):
    return {name: value for name, value in GOOD.items() if name != key}


CASES = {
    "nothing wrong": (GOOD, []),
    "a plain script's": ({"train_batch_size": 8, "optimizer": {"type": "Adam"}}, []),
    "the section's own": ({"train_batch_size": 8, "ds_npu": {"chunked_loss": "auto"}}, []),
    "auto that nobody fills": (
        GOOD | {"aio": {"block_size": "auto"}, "steps_per_print": "auto"},
        ['aio.block_size, steps_per_print "auto": nobody fills this in'],
    ),
    "numbers": (
        GOOD | {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}},
        ["train_micro_batch_size_per_gpu 4 (per_device_train_batch_size), bf16.enabled true (bf16): each must be"],
    ),
    "no accumulation": (
        without("gradient_accumulation_steps"),
        ["gradient_accumulation_steps is left out: accelerate"],
    ),
    "no clipping": (without("gradient_clipping"), ["gradient_clipping is left out: DeepSpeed clips to 1.0"]),
    "no ZeRO": (without("zero_optimization"), ["zero_optimization is left out: accelerate raises ValueError"]),
    "an optimizer": (
        GOOD | {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
        ["optimizer is DeepSpeed's: the argument optim is ignored"],
    ),
    "a scheduler": (
        GOOD | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
        ["scheduler is DeepSpeed's: the argument lr_scheduler_type is ignored"],
    ),
    "offload": (
        GOOD | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        ["zero_optimization.offload_optimizer without optimizer: accelerate trains with DeepSpeedCPUAdam"],
    ),
    "weights that are not gathered": (
        GOOD | {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": "auto"}, "ds_npu": {}},
        [f"{GATHERED} is not true: under ZeRO 3 the Trainer's save_model"],
    ),
    "weights that ds_npu gathers": (GOOD | {"zero_optimization": {"stage": 3}}, []),
}


@pytest.mark.parametrize("title", CASES)
def test_each_trap_is_one_warning(title):
    ds_config, begins = CASES[title]
    said = trainer_traps(ds_config)
    assert len(said) == len(begins), said
    assert all(line.startswith(begin) for line, begin in zip(said, begins, strict=True)), said


def nested(path, value):
    """A config with ``value`` at ``path``."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


class Arguments:
    """TrainingArguments as the Trainer's DeepSpeed config reads them; each value is unlike all others."""

    world_size, per_device_train_batch_size, gradient_accumulation_steps = 1, 3, 5
    max_grad_norm, learning_rate, weight_decay = 0.25, 0.125, 0.0625
    adam_beta1, adam_beta2, adam_epsilon = 0.5, 0.75, 0.03125
    save_on_each_node = fp16 = fp16_full_eval = bf16_full_eval = False
    bf16 = True
    distributed_state = None

    def get_warmup_steps(self, steps):
        return steps // 10


class Config:
    hidden_size = 64


class Model:
    config = Config()


@pytest.mark.parametrize("path", sorted(ARGUMENTS))
def test_the_trainer_refuses_another_value_of_each_key_that_is_named(path):
    theirs = HfTrainerDeepSpeedConfig(nested(path, 7) | {"zero_optimization": {"stage": 0}})
    theirs.trainer_config_process(Arguments())
    with pytest.raises(ValueError, match=rf"ds {path}=7 vs hf "):
        theirs.trainer_config_finalize(Arguments(), Model(), 100)


@pytest.mark.parametrize("path", sorted(FILLED))
def test_each_auto_that_is_said_to_be_filled_in_is(path):
    ds_config = {"zero_optimization": {"stage": 3}}
    node = ds_config
    *parts, key = path.split(".")
    for part in parts:
        node = node.setdefault(part, {})
    node[key] = "auto"
    theirs = HfTrainerDeepSpeedConfig(ds_config)
    theirs.trainer_config_process(Arguments())
    plugin = DeepSpeedPlugin(hf_ds_config=theirs)
    theirs.trainer_config_finalize(Arguments(), Model(), 100)
    hidden = {f"zero_optimization.{each}": 1 for each in ("reduce_bucket_size", "stage3_prefetch_bucket_size")}
    plugin.deepspeed_config_process(must_match=False, **hidden)
    assert theirs.get_value(path) != "auto"


def test_accelerate_refuses_another_auto():
    plugin = DeepSpeedPlugin(hf_ds_config=copy.deepcopy(GOOD | {"steps_per_print": 1, "aio": {"block_size": "auto"}}))
    filled = {
        "gradient_accumulation_steps": 1,
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "bf16.enabled": True,
        "gradient_clipping": 1,
    }
    with pytest.raises(ValueError, match=r"`aio.block_size` not found in kwargs"):
        plugin.deepspeed_config_process(must_match=False, **filled, **{"zero_optimization.reduce_bucket_size": 1})


def test_defaults_are_accelerates():
    plugin = DeepSpeedPlugin(hf_ds_config=copy.deepcopy(without("gradient_accumulation_steps")))
    assert plugin.deepspeed_config["gradient_accumulation_steps"] == 1
    with pytest.raises(ValueError, match="Please specify the ZeRO optimization config"):
        DeepSpeedPlugin(hf_ds_config=copy.deepcopy(without("zero_optimization")))


def test_clipping_that_is_left_out_is_deepspeeds():
    from deepspeed.runtime.config import get_gradient_clipping

    assert get_gradient_clipping({}) == 1.0


def test_the_command_prints_them(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(without("gradient_clipping")))
    assert main(["check", str(path), "--world-size", "4"]) == 0
    said = capsys.readouterr().out
    assert 'With the Hugging Face Trainer or accelerate, which fill in "auto"\n  gradient_clipping is left out' in said
