"""Lives of a Hugging Face Trainer, one after the other in one world of ranks, which tests compare with one process.

Nothing of what a life does knows of ds_npu, as in people's scripts. SGD with momentum, and clipping that bites.
"""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradient_rule as rule
import numpy
import peft
import torch
import torch.distributed as dist
import transformers
from torch.nn import functional
from trainer_script import Rows, Watched, accuracy, collate
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

Said = dict[str, Any]


class Stream(torch.utils.data.IterableDataset):
    """The rows, without a length."""

    def __init__(self, count: int) -> None:
        self.rows = Rows(count)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return (self.rows[index] for index in range(len(self.rows)))


class Life(Watched):
    """Makes its optimizer itself, as DeepSpeed's config names none."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=self.args.learning_rate, momentum=0.9)
        return self.optimizer


class SmallMemory(Life):
    """Runs out of memory with more than two samples."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        if len(inputs["input_ids"]) > 2:
            raise RuntimeError("CUDA out of memory.")
        return super().compute_loss(model, inputs, *args, **kwargs)


class Terminated(transformers.TrainerCallback):
    """The last rank is sent SIGTERM within the third step."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2 and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)  # The handler starts a timer.


def own_loss(outputs, labels, num_items_in_batch=None):
    """A user's ``compute_loss_func``: of whole logits."""
    logits, wanted = outputs.logits[:, :-1].float(), labels[:, 1:]
    each = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum")
    return (each + 0.01 * logits.logsumexp(-1)[wanted != -100].square().sum()) / num_items_in_batch


@dataclass(frozen=True)
class Kind:
    """What a life does."""

    options: dict[str, object]
    """TrainingArguments."""
    more: Callable[[], dict[str, Any]] = dict
    """Arguments of the Trainer."""
    trainer: type[Watched] = Life
    stream: bool = False
    resumes: str | None = None
    """A checkpoint, in the folder of all lives."""
    ends: Callable[[Life, Path], Said] = field(default=lambda trainer, folder: {})
    """What it does after training."""
    adapters: dict[str, object] | None = None
    """PEFT's LoraConfig."""


def saved_and_predicted(trainer: Life, folder: Path) -> Said:
    """Evaluates, predicts with the best model and saves it."""
    trainer.save_model(str(folder))
    found = trainer.predict(Rows(10))
    kept = sorted(path.name for path in folder.glob("checkpoint-*"))
    metrics = timeless(found.metrics | trainer.evaluate())
    said = {"metrics": metrics, "kept": kept, "best": trainer.state.best_metric, "labels": found.label_ids}
    return said | {"predictions": of_tokens(found)}


def of_tokens(found: Any) -> numpy.ndarray:
    """Predictions of tokens; padding attends to other padding with context ranks."""
    return found.predictions[found.label_ids != -100]


def early() -> dict[str, Any]:
    return {"callbacks": [transformers.EarlyStoppingCallback(early_stopping_patience=2)]}


def terminated() -> dict[str, Any]:
    return {"callbacks": [Terminated()]}


EVERY = {"eval_strategy": "steps", "eval_steps": 2}
WHOLE = EVERY | {
    "max_steps": 8,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    # The highest loss: the best checkpoint is the first one, and those between it and the last one go.
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,
    "eval_on_start": True,
    "eval_accumulation_steps": 1,
    "include_num_input_tokens_seen": "all",
}
FOUND = {"per_device_train_batch_size": 3, "auto_find_batch_size": True}
KINDS: dict[str, Kind] = {
    "whole": Kind(WHOLE, ends=saved_and_predicted),
    "resumed": Kind(WHOLE, resumes="whole/checkpoint-2"),
    "data not skipped": Kind({"max_steps": 4, "ignore_data_skip": True}, resumes="whole/checkpoint-2"),
    "by length": Kind(
        EVERY
        | {
            "max_steps": 3,
            "train_sampling_strategy": "group_by_length",
            "include_num_input_tokens_seen": "non_padding",
            "average_tokens_across_devices": False,
            "torch_empty_cache_steps": 1,
            "dataloader_drop_last": True,
        }
    ),
    "rebalanced": Kind({"max_steps": 3, "train_sampling_strategy": "batch_rebalance"}),
    "smoothed": Kind(EVERY | {"max_steps": 2, "label_smoothing_factor": 0.1}),
    "own loss": Kind(EVERY | {"max_steps": 2}, lambda: {"compute_loss_func": own_loss}),
    "noise": Kind({"max_steps": 2, "neftune_noise_alpha": 5.0}),
    "early": Kind(WHOLE | {"eval_steps": 1, "save_steps": 1}, early),
    "stream": Kind(EVERY | {"max_steps": 4}, stream=True),
    "stream, each reads": Kind({"max_steps": 4, "accelerator_config": {"dispatch_batches": False}}, stream=True),
    "stream, split": Kind(
        EVERY | {"max_steps": 2, "per_device_train_batch_size": 4, "accelerator_config": {"split_batches": True}},
        stream=True,
    ),
    "found": Kind({"max_steps": 2} | FOUND, trainer=SmallMemory),
    "uninterrupted": Kind({"max_steps": 5}),
    "terminated": Kind({"max_steps": 5, "enable_jit_checkpoint": True}, terminated),
    "after it": Kind({"max_steps": 5}, resumes="terminated/checkpoint-3"),
}


def adapters_saved(trainer: Life, folder: Path) -> Said:
    trainer.save_model(str(folder))
    beside = ["past_key_values", "aux_loss", "router_logits"]
    return {"predictions": of_tokens(trainer.predict(Rows(4), ignore_keys=beside))}


SAVED = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"r": 3, "lora_alpha": 5, "target_modules": PROJECTIONS, "task_type": "CAUSAL_LM"}


def adapted(**changes: object) -> Kind:
    return Kind(SAVED, ends=adapters_saved, adapters=LORA | changes)


ADAPTED: dict[str, Kind] = {
    "lora": adapted(),
    "lora, resumed": Kind(SAVED, resumes="lora/checkpoint-3", adapters=LORA),
    "rslora": adapted(use_rslora=True, target_modules=["q_proj", "o_proj"]),
    "modules to save": adapted(target_modules=["v_proj"], modules_to_save=["lm_head", "norm"]),
    "dora": adapted(use_dora=True),
    "experts": adapted(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]),
}
"""Lives of a model with PEFT's adapters."""

# With the Trainer's own AdamW, or the config's.
IN_BF16: dict[str, Kind] = {
    "bf16": Kind(WHOLE | {"bf16": True}, trainer=Watched, ends=saved_and_predicted),
    "bf16, resumed": Kind(WHOLE | {"bf16": True}, trainer=Watched, resumes="bf16/checkpoint-2"),
}


def timeless(logged: dict[str, Any]) -> dict[str, Any]:
    """Without what a clock said, and without FLOP, which are counted of each rank's weights."""
    ends = ("runtime", "per_second", "_time", "total_flos")
    return {name: value for name, value in logged.items() if not name.endswith(ends)}


def ds_config(stage: int, parallel: dict[str, object] | None, **zero: object) -> dict[str, object]:
    config: dict[str, object] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_param_persistence_threshold": 0,
            **zero,
        },
    }
    return config if parallel is None else config | {"ds_npu": {"parallel": parallel}}


def lived(title: str, folder: Path, start: str, config: dict[str, object]) -> Said:
    """What this rank can say of the life ``title``."""
    kind = (KINDS | ADAPTED | IN_BF16)[title]
    usual = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 2}
    usual |= {"logging_steps": 1, "learning_rate": 0.05, "max_grad_norm": 0.5, "save_strategy": "no", "seed": 3}
    usual |= {"report_to": "none", "disable_tqdm": True, "use_cpu": os.environ.get("DS_ACCELERATOR") == "cpu"}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / title), deepspeed=copy.deepcopy(config), **usual | kind.options
    )
    transformers.set_seed(arguments.seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(start, attn_implementation="eager")
    if kind.adapters is not None:
        torch.manual_seed(4)
        model = peft.get_peft_model(model, peft.LoraConfig(**kind.adapters))
    rows = Stream if kind.stream else Rows
    trainer = kind.trainer(
        model=model,
        args=arguments,
        train_dataset=rows(22),
        eval_dataset=rows(10),
        data_collator=collate,
        compute_metrics=accuracy,
        **kind.more(),
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    for each in trainer.callback_handler.callbacks:
        if isinstance(each, JITCheckpointCallback):
            each.jit_manager.kill_wait = 0
    trainer.train(resume_from_checkpoint=None if kind.resumes is None else str(folder / kind.resumes))
    said = {"samples": trainer.samples, "losses": trainer.losses, "rates": trainer.rates}
    said |= {"log": [timeless(each) for each in trainer.state.log_history]}
    said |= kind.ends(trainer, folder / title)
    trainer.accelerator.free_memory()
    return said


def live(titles: list[str], folder: str, start: str, config: dict[str, object]) -> None:
    """The body of a rank: ``titles``, one after the other; ``told`` reads what it writes."""
    rule.without_extension()
    transformers.logging.set_verbosity_error()
    said = {}
    for title in titles:
        said[title] = lived(title, Path(folder), start, config)
        torch.save(said, Path(folder) / f"said by {dist.get_rank()}.pt")


def told(folder: Path, ranks: int) -> list[dict[str, Said]]:
    """What each rank said, by the titles of its lives."""
    return [torch.load(folder / f"said by {rank}.pt", weights_only=False) for rank in range(ranks)]


def assert_close(found: Any, expected: Any, rtol: float, where: str) -> None:
    """The same values, keys and lengths; numbers that are no integers within ``rtol``."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), (where, found.keys() ^ expected.keys())
        for name, value in expected.items():
            assert_close(found[name], value, rtol, f"{where}, {name}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), (where, found, expected)
        for index, value in enumerate(expected):
            assert_close(found[index], value, rtol, f"{where}, {index}")
    elif isinstance(expected, numpy.ndarray) and expected.dtype.kind == "f":
        error = numpy.linalg.norm((found - expected).astype("d")) / numpy.linalg.norm(expected.astype("d"))
        assert error <= rtol, (where, error)
    elif isinstance(expected, float):
        assert abs(found - expected) <= rtol * abs(expected), (where, found, expected)
    else:
        assert numpy.array_equal(found, expected), (where, found, expected)
