"""A script for the Hugging Face Trainer whose rank 1 dies in the forward of its third step, as its first argument says.

killed: by SIGKILL. raises: an error of its own. Run by a test.
"""

from __future__ import annotations

import os
import signal
import sys

import deepspeed.ops
import tiny_models
import torch
import transformers
from trainer_script import Rows, collate

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Dying(transformers.TrainerCallback):
    """Rank 1 ends before the last norm of the model, which the last pipeline stage has."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2 and args.process_index == 1:
            model.model.norm.register_forward_pre_hook(die)


def die(module: torch.nn.Module, inputs: object) -> None:
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise KeyError("no such column")


def main() -> None:
    transformers.logging.set_verbosity_error()
    (arguments,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_args_into_dataclasses(
        sys.argv[2:]
    )
    transformers.Trainer(
        model=tiny_models.tiny("llama", torch.float32),
        args=arguments,
        train_dataset=Rows(22),
        data_collator=collate,
        callbacks=[Dying()],
    ).train()


if __name__ == "__main__":
    main()
