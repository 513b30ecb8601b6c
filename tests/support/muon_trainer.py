"""The Trainer with Muon over two tensor ranks: ``FOLDER first`` trains, ``FOLDER resume`` goes on from its checkpoint.

Rank 0 writes the whole weights behind the last step to FOLDER.
"""

from __future__ import annotations

import sys

import deepspeed
import tiny_models
import torch
from transformers import Trainer, TrainingArguments

from ds_npu.zero_ext.matrix_optimizer import MatrixOptimizer

MUON = {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 0.01, "momentum": 0.9, "torch_adam": True}}
"""Betas, eps and weight_decay, if they are there, have to be the Trainer's."""


def main(folder: str, run: str) -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    samples = [{"input_ids": each, "labels": each} for each in tiny_models.tokens(32, 10)]
    ds_config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2},
        "optimizer": MUON,
        "ds_npu": {"parallel": {"tensor": 2}, "muon": {"scale": "rms"}},
    }
    given = {"per_device_train_batch_size": 2, "max_steps": 4, "save_steps": 2, "logging_steps": 1, "report_to": []}
    args = TrainingArguments(f"{folder}/trainer", deepspeed=ds_config, use_cpu=True, **given)
    trainer = Trainer(model=tiny_models.tiny("llama", torch.float32), args=args, train_dataset=samples)
    trainer.train(resume_from_checkpoint=f"{folder}/trainer/checkpoint-2" if run == "resume" else None)
    assert isinstance(trainer.model_wrapped.basic_optimizer, MatrixOptimizer)
    weights = trainer.model_wrapped.whole_state_dict()
    if torch.distributed.get_rank() == 0:
        torch.save(weights, f"{folder}/{run}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
