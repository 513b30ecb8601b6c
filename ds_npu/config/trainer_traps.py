"""Warnings about what the Hugging Face Trainer and accelerate do with a config in silence.

They fill in ``"auto"``, so a config that holds one is theirs. Source: transformers 5.23 (``integrations/deepspeed.py``,
``trainer.py``) and accelerate 1.15 (``utils/dataclasses.py``, ``utils/deepspeed.py``, ``accelerator.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

from ds_npu.config.batch import STEPS
from ds_npu.config.deepspeed_keys import SECTION, value_at, zero_stage
from ds_npu.config.deepspeed_readers import NOTHING, value_of
from ds_npu.config.deepspeed_schema import is_auto
from ds_npu.config.problems import Config, printable, shown

ARGUMENTS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    STEPS: "gradient_accumulation_steps",
    "train_batch_size": "the product of the batch sizes and the data ranks",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "[adam_beta1, adam_beta2]",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.total_num_steps": "the steps of the run",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}
"""Keys that the Trainer compares with an argument of its own, and that argument."""
ZERO = "zero_optimization"
GATHERED = f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
FILLED = {
    *ARGUMENTS,
    "scheduler.params.warmup_min_lr",
    GATHERED,
    *(f"{ZERO}.{key}" for key in ("stage", "reduce_bucket_size", "stage3_prefetch_bucket_size")),
    f"{ZERO}.stage3_param_persistence_threshold",
    *(f"{ZERO}.offload_{what}.{key}" for what in ("optimizer", "param") for key in ("device", "nvme_path")),
}
"""Keys whose "auto" the Trainer replaces. accelerate raises ValueError for every other one."""


def trainer_traps(ds_config: Config) -> list[str]:
    """Warnings about a config that the Trainer or accelerate fills in; none where no value is "auto"."""
    autos = [*_autos({key: value for key, value in ds_config.items() if key != SECTION})]
    if not autos:
        return []
    left = [printable(path) for path in autos if path not in FILLED]
    first = f'{", ".join(left)} "auto": nobody fills this in, and accelerate raises ValueError. Leave the key out'
    return [*([first] if left else []), *_compared(ds_config), *_differing(ds_config), *_saved(ds_config)]


def _autos(values: Config, prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _autos(value, f"{prefix}{key}.")
        elif is_auto(value):
            yield f"{prefix}{key}"


def _compared(ds_config: Config) -> Iterator[str]:
    stated = {path: value_of(ds_config, path) for path in ARGUMENTS}
    fixed = [
        f"{path} {shown(value)} ({ARGUMENTS[path]})"
        for path, value in stated.items()
        if value is not NOTHING and not is_auto(value)
    ]
    if fixed:
        yield (
            f"{', '.join(fixed)}: each must be the value in TrainingArguments (in brackets), or the Trainer raises "
            'ValueError once the model is loaded; "auto" always is'
        )


def _differing(ds_config: Config) -> Iterator[str]:
    if ZERO not in ds_config:
        yield f'{ZERO} is left out: accelerate raises ValueError. {{"stage": 0}} is accepted'
    if STEPS not in ds_config:
        yield f'{STEPS} is left out: accelerate takes 1, whatever the argument says. "auto" takes the argument'
    if "gradient_clipping" not in ds_config:
        yield 'gradient_clipping is left out: DeepSpeed clips to 1.0, whatever max_grad_norm says. "auto" takes it'
    if "optimizer" in ds_config:
        yield (
            "optimizer is DeepSpeed's: the argument optim is ignored, and weight_decay decays biases and norms, too, "
            "which the Trainer's own optimizer does not. Leave the key out to have the Trainer's"
        )
    elif value_at(ds_config, f"{ZERO}.offload_optimizer.device") not in (None, "none"):
        yield (
            f"{ZERO}.offload_optimizer without optimizer: accelerate trains with DeepSpeedCPUAdam whatever the "
            "argument optim says, unless that is an Adagrad or bitsandbytes' Lion"
        )
    if "scheduler" in ds_config:
        yield (
            "scheduler is DeepSpeed's: the argument lr_scheduler_type is ignored. Leave the key out to have the "
            "Trainer's"
        )


def _saved(ds_config: Config) -> Iterator[str]:
    # ds_npu gathers what it has sharded over tensor ranks without being told to.
    is_sharded = value_at(ds_config, f"{SECTION}.parallel.tensor") not in (None, 1)
    if zero_stage(ds_config) == 3 and value_at(ds_config, GATHERED) is not True and not is_sharded:
        yield (
            f"{GATHERED} is not true: under ZeRO 3 the Trainer's save_model writes DeepSpeed's checkpoint in place of "
            "the model's weights. Set it to true"
        )
