"""A script for TRL's SFTTrainer or DPOTrainer as people have it: it knows nothing of ds_npu. Run by a test."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import deepspeed.ops
import tiny_models
import tokenizers
import torch
import transformers
import trl
from datasets import Dataset

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Of the words w0, w1, ..."""
    words = {f"w{number}": number for number in range(tiny_models.VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w3"
    )


def rows(kind: str, count: int) -> Dataset:
    """Prompts and completions of different lengths."""
    found = []
    for index, row in enumerate(tiny_models.tokens(2 * count, 14).tolist()[::2]):
        words = [f"w{word}" for word in row]
        prompt, answers = " ".join(words[: 3 + index % 3]), (words[6 : 14 - index % 5], words[7 : 12 + index % 3])
        chosen, rejected = (" " + " ".join(answer) for answer in answers)
        names = {"sft": {"completion": chosen}, "dpo": {"chosen": chosen, "rejected": rejected}}
        found.append({"prompt": prompt} | names[kind])
    return Dataset.from_list(found)


class Watched:
    """Remembers the losses that it trained on."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses = [*vars(self).get("losses", []), float(loss)]
        return loss


class SFT(Watched, trl.SFTTrainer):
    """TRL's."""


class DPO(Watched, trl.DPOTrainer):
    """TRL's."""


def main() -> None:
    transformers.logging.set_verbosity_error()
    kind = sys.argv.pop(1)
    config, trainer_class = {"sft": (trl.SFTConfig, SFT), "dpo": (trl.DPOConfig, DPO)}[kind]
    (arguments,) = transformers.HfArgumentParser(config).parse_args_into_dataclasses()
    others = {}
    if kind == "dpo":
        others["ref_model"] = tiny_models.tiny("llama", torch.float32, attn_implementation="sdpa")
        with torch.no_grad():
            for weight in others["ref_model"].parameters():
                weight.mul_(0.9)
    trainer = trainer_class(
        model=tiny_models.tiny("llama", torch.float32, attn_implementation="sdpa"),
        args=arguments,
        train_dataset=rows(kind, 24),
        eval_dataset=rows(kind, 8),
        processing_class=tokenizer(),
        **others,
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    names = ("entropy", "mean_token_accuracy", "grad_norm", "rewards/margins", "logits/chosen", "num_tokens")
    logged = [{name: each[name] for name in names if name in each} for each in trainer.state.log_history]
    said = {"losses": trainer.losses, "logged": logged, "eval_loss": metrics["eval_loss"]}
    (Path(arguments.output_dir) / f"said by {arguments.process_index}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
    # Not by the interpreter: gloo may abort a process that ends while its threads are at work.
    sys.stdout.flush()
    os._exit(0)
