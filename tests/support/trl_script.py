"""A script for one of TRL's trainers as people have it: it knows nothing of ds_npu. Run by a test."""

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
    # A word for the start of an answer, and no others: a conversation's words are the answers' and questions'.
    template = (
        "{% for each in messages %}{% if each.role == 'assistant' %}w5 {% generation %}{{ each.content }} w2"
        "{% endgeneration %}{% else %}w4 {{ each.content }} {% endif %}{% endfor %}"
    )
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="w0",
        bos_token="w1",
        eos_token="w2",
        unk_token="w3",
        chat_template=template,
    )


def rows(kind: str, count: int) -> Dataset:
    """Prompts and completions of different lengths."""
    found = []
    for index, row in enumerate(tiny_models.tokens(2 * count, 14).tolist()[::2]):
        words = [f"w{word}" for word in row]
        prompt, answers = " ".join(words[: 3 + index % 3]), (words[6 : 14 - index % 5], words[7 : 12 + index % 3])
        chosen, rejected = (" " + " ".join(answer) for answer in answers)
        pair = {"chosen": chosen, "rejected": rejected}
        talk = [{"role": "user", "content": prompt}, {"role": "assistant", "content": chosen.strip()}]
        completed = {"completion": chosen}
        answered = {"sft": completed, "experts": completed, "dpo": pair, "grpo": {}, "rloo": {}}
        whole = {name: prompt + each for name, each in pair.items()}
        alone = {"reward": whole, "chat": {"messages": [*talk, *talk]}}
        found.append(alone[kind] if kind in alone else {"prompt": prompt} | answered[kind])
    return Dataset.from_list(found)


class Watched:
    """Remembers the losses that it trained on."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses = [*vars(self).get("losses", []), float(loss)]
        return loss


def words_of(completions: list[str], **_: object) -> list[float]:
    """A reward of a completion: how many different words it has, and a bit for its first."""
    found = [completion.split() for completion in completions]
    return [len(set(words)) + (int(words[0][1:]) / 64 if words else 0.0) for words in found]


TRAINERS = {
    "sft": (trl.SFTConfig, trl.SFTTrainer),
    "chat": (trl.SFTConfig, trl.SFTTrainer),
    "experts": (trl.SFTConfig, trl.SFTTrainer),
    "dpo": (trl.DPOConfig, trl.DPOTrainer),
    "reward": (trl.RewardConfig, trl.RewardTrainer),
    "grpo": (trl.GRPOConfig, trl.GRPOTrainer),
    "rloo": (trl.RLOOConfig, trl.RLOOTrainer),
}
LOGGED = ("entropy", "mean_token_accuracy", "grad_norm", "rewards/margins", "logits/chosen", "num_tokens")
LOGGED += ("aux_loss", "margin", "accuracy", "reward", "reward_std", "completions/mean_length")


def model_of(kind: str) -> transformers.PreTrainedModel:
    """A Llama: of scores where a reward is trained, of words else, with weights that are numbers of bf16, too."""
    if kind == "experts":
        return tiny_models.tiny("qwen3_moe", torch.bfloat16, attn_implementation="sdpa").float()
    if kind != "reward":
        return tiny_models.tiny("llama", torch.bfloat16, attn_implementation="sdpa").float()
    config = tiny_models.config_of("llama", num_labels=1, attn_implementation="sdpa")
    torch.manual_seed(0)
    return transformers.AutoModelForSequenceClassification.from_config(config)


def others_of(kind: str) -> dict[str, object]:
    """What else a trainer is given."""
    if kind != "dpo":
        return {"reward_funcs": words_of} if kind in ("grpo", "rloo") else {}
    reference = model_of(kind)
    with torch.no_grad():
        for weight in reference.parameters():
            weight.mul_(0.9)
    return {"ref_model": reference}


def main() -> None:
    transformers.logging.set_verbosity_error()
    kind = sys.argv.pop(1)
    config, plain_trainer = TRAINERS[kind]
    (arguments,) = transformers.HfArgumentParser(config).parse_args_into_dataclasses()
    if vars(arguments).get("padding_free"):
        arguments.max_length = None  # As TRL asks; a command line cannot say it.
    trainer = type("Trainer", (Watched, plain_trainer), {})(
        model=model_of(kind),
        args=arguments,
        train_dataset=rows(kind, 24),
        eval_dataset=rows(kind, 8),
        processing_class=tokenizer(),
        **others_of(kind),
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    logged = [{name: each[name] for name in LOGGED if name in each} for each in trainer.state.log_history]
    said = {"losses": trainer.losses, "logged": logged, "eval_loss": metrics["eval_loss"]}
    (Path(arguments.output_dir) / f"said by {arguments.process_index}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
    # Not by the interpreter: gloo may abort a process that ends while its threads are at work.
    sys.stdout.flush()
    os._exit(0)
