"""A script that saves behind training on a slow disk, and then ends, or waits for a signal: FOLDER and END."""

from __future__ import annotations

import sys
import time

import deepspeed
import torch

from ds_npu.checkpoint.digests import DigestedWriter

FOLDER, END = sys.argv[1:]
WRITE = DigestedWriter.write


def slowly(self, data):
    time.sleep(0.05)
    return WRITE(self, data)


DigestedWriter.write = slowly
# Files of which pieces are hashed on another thread.
model = torch.nn.Sequential(torch.nn.Linear(8, 200), torch.nn.Linear(200, 200), torch.nn.Linear(200, 8))
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "ds_npu": {"checkpoint": {"asynchronous": True}},
}
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
engine.backward(engine(torch.ones(1, 8)).sum())
engine.step()
engine.save_checkpoint(FOLDER)
print("saving", flush=True)
if END == "error":
    raise ValueError("the script has an error of its own")
if END == "wait":
    time.sleep(600)
