"""Trains small models for three steps each, on ranks started by ``torchrun``; prints the peaks of memory.

    torchrun --nproc-per-node N tests/npu/training_steps.py CASES.json

The file has a list of [family, DeepSpeed config].
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import tiny_models
import torch
import torch.distributed as dist

STEPS, SAMPLES, LENGTH = 3, 4, 16


def mark(begins: bool) -> None:
    """Marks in a record where training begins and ends: before, the host does other things for other numbers."""
    if begins:
        torch.linspace(0, 1, 7, device="npu")
    else:
        torch.eye(7, device="npu")


def train(family: str, config: dict[str, Any]) -> None:
    torch.npu.synchronize()
    gc.collect()
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    torch.manual_seed(1)
    model = tiny_models.tiny(family, torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    words = torch.randint(0, 64, (STEPS, SAMPLES, LENGTH), generator=torch.Generator().manual_seed(2))
    mark(begins=True)
    for ids in words.to(engine.device):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    mark(begins=False)
    torch.npu.synchronize()
    peaks = torch.npu.max_memory_allocated(), torch.npu.max_memory_reserved()
    sys.stdout.write(json.dumps({"rank": dist.get_rank(), "loss": loss.item(), "peaks": peaks}) + "\n")
    sys.stdout.flush()
    engine.destroy()


def main() -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("hccl")
    for family, config in json.loads(Path(sys.argv[1]).read_text()):
        train(family, config)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
