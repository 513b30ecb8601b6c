"""Trains a small model for three steps, on ranks started by ``torchrun``; prints each rank's peak of device memory.

torchrun --nproc-per-node N tests/npu/training_steps.py CONFIG.json [llama|qwen3_moe]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import deepspeed
import tiny_models
import torch
import torch.distributed as dist

STEPS, SAMPLES, LENGTH = 3, 4, 16


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("hccl")
    torch.manual_seed(1)
    model = tiny_models.tiny(sys.argv[2], torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    # Marks in a record where training begins: before, the host may do other things for the numbers that it reads.
    torch.linspace(0, 1, 7, device=engine.device)
    words = torch.randint(0, 64, (STEPS, SAMPLES, LENGTH), generator=torch.Generator().manual_seed(2))
    for ids in words.to(engine.device):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    torch.npu.synchronize()
    peaks = (torch.npu.max_memory_allocated(), torch.npu.max_memory_reserved())
    sys.stdout.write(json.dumps([dist.get_rank(), loss.item(), *peaks]) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
