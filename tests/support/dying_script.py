"""A script for DeepSpeed whose rank 1 is killed in its third step. Run by a test: forward, backward, step or save."""

from __future__ import annotations

import os
import signal
import sys
import tempfile

import deepspeed
import tiny_models
import torch
from deepspeed.accelerator import get_accelerator

import ds_npu  # noqa: F401  (where it is not installed)

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "ds_npu": {"parallel": {"tensor": 2}},
}


def main() -> None:
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    model = tiny_models.tiny("llama", torch.float32)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)

    def die_in(place: str) -> None:
        if engine.global_steps == 2 and place == sys.argv[1] and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    while True:
        ids = tiny_models.tokens(2, 9).to(engine.device)
        die_in("forward")
        loss = engine(input_ids=ids, labels=ids).loss
        die_in("backward")
        engine.backward(loss)
        die_in("step")
        if engine.global_steps == 2:
            with tempfile.TemporaryDirectory() as folder:
                die_in("save")
                engine.save_checkpoint(folder)
        engine.step()


if __name__ == "__main__":
    main()
