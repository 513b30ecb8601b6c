"""A script for the Hugging Face Trainer as people have it: it knows nothing of ds_npu. Run by a test."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import deepspeed.ops
import numpy
import tiny_models
import torch
import transformers

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Rows(torch.utils.data.Dataset):
    """Sequences of different lengths, which the collator pads."""

    def __init__(self, count: int) -> None:
        self.rows = tiny_models.tokens(count, 16)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = self.rows[index, : 16 - index % 5].tolist()
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Padded to 16."""
    fills = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.tensor([sample[name] + [fill] * (16 - len(sample[name])) for sample in samples])
        for name, fill in fills.items()
    }


class Watched(transformers.Trainer):
    """Remembers what it trained on."""

    def __init__(self, **given) -> None:
        super().__init__(**given)
        self.samples, self.losses, self.rates = [], [], []

    def training_step(self, model, inputs, *args, **kwargs):
        self.samples.append(inputs["input_ids"][:, 0].tolist())
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.losses.append(float(loss))
        self.rates += self.lr_scheduler.get_last_lr()
        return loss


def accuracy(evaluated: transformers.EvalPrediction) -> dict[str, float]:
    """Of the next token, over those that count."""
    guessed, wanted = evaluated.predictions.argmax(-1)[:, :-1], evaluated.label_ids[:, 1:]
    return {"accuracy": float(numpy.mean((guessed == wanted)[wanted != -100])), "samples": len(wanted)}


@dataclass
class ModelArguments:
    """As in transformers' examples."""

    model_name_or_path: str | None = None
    config_name: str | None = None


def model_for(given: ModelArguments) -> torch.nn.Module:
    """The model, made after TrainingArguments: under ZeRO 3 transformers enters zero.Init by itself."""
    if given.model_name_or_path is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(given.model_name_or_path, attn_implementation="eager")
    if given.config_name is not None:
        config = transformers.AutoConfig.from_pretrained(given.config_name)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return tiny_models.tiny("llama", torch.float32)


def main() -> None:
    transformers.logging.set_verbosity_error()
    parser = transformers.HfArgumentParser((ModelArguments, transformers.TrainingArguments))
    given, arguments = parser.parse_args_into_dataclasses()
    transformers.set_seed(arguments.seed)
    trainer = Watched(
        model=model_for(given),
        args=arguments,
        train_dataset=Rows(22),
        eval_dataset=Rows(10),
        data_collator=collate,
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    metrics = trainer.evaluate()
    assert metrics["eval_samples"] == 10, metrics
    trainer.save_model()
    said = {"samples": trainer.samples, "losses": trainer.losses, "rates": trainer.rates}
    said["train_batch_size"] = trainer.get_total_train_batch_size(arguments)
    said |= {"eval_loss": metrics["eval_loss"], "accuracy": metrics["eval_accuracy"]}
    (Path(arguments.output_dir) / f"said by {arguments.process_index}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
    # Not by the interpreter: gloo may abort a process that ends while its threads are at work.
    sys.stdout.flush()
    os._exit(0)
