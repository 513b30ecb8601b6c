"""A script of one linear layer, whose ranks end as the last argument says. Run by tests, with DeepSpeed or without.

refused: the config is wrong. alike: all ranks raise. alone0, alone1: one rank raises in its second step. killed0,
killed1: one rank is killed there. interrupted: Ctrl-C on all. late: all raise, rank 0 a second later. saves0, saves1:
one rank saves alone at the end.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time

import torch
import torch.distributed as dist

HOW = sys.argv[-1]  # DeepSpeed's launcher puts --local_rank first
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "ds_npu": {"parallel": {"tensor": 7 if HOW == "refused" else 1}},
}


def read_batch(rank: int, step: int) -> torch.Tensor:
    """What the user's own code does, in which things go wrong."""
    if step == 1:
        if HOW in ("alike", "late"):
            time.sleep(1.0 if rank == 0 and HOW == "late" else 0.0)
            raise ValueError(f"batch {step} is empty")
        if f"alone{rank}" == HOW:
            raise KeyError(f"no such column on rank {rank}")
        if f"killed{rank}" == HOW:
            os.kill(os.getpid(), signal.SIGKILL)
        if HOW == "interrupted":
            raise KeyboardInterrupt
    return torch.ones(2, 4)


def train_plainly(rank: int) -> None:
    """What of DeepSpeed matters here, in a tenth of the time that it takes to import it."""
    from ds_npu.engine.failures.failed_ranks import explain_failed_ranks

    explain_failed_ranks()
    dist.init_process_group("gloo")
    explain_failed_ranks()
    for step in range(3):
        dist.all_reduce(read_batch(rank, step))


def train(rank: int) -> None:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = torch.nn.Linear(4, 1)
    if HOW != "refused":
        deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    for step in range(3):
        engine.backward(engine(read_batch(rank, step)).square().mean())
        engine.step()
    if f"saves{rank}" == HOW:
        with tempfile.TemporaryDirectory() as folder:
            engine.save_checkpoint(folder)


if __name__ == "__main__":
    (train_plainly if "--plainly" in sys.argv else train)(int(os.environ.get("RANK", "0")))
