"""Accumulation by ``no_sync`` and batches that fail on one rank, in pipeline stages over simulated NPUs."""

from __future__ import annotations

import accumulations
import torch
from caught_failures import Run, failing, fails_on, hold, shorter
from ranks import run_on_ranks

ERROR = 2e-2
"""In bf16; a batch that is forgotten changes gradients by more than a tenth."""


def section(schedule: str) -> dict:
    return {"parallel": {"pipeline": 2}, "pipeline": {"schedule": schedule}}


def bad_batches(run: Run) -> None:
    for rank in range(2):
        given = shorter(run.batches[0]) if rank else run.batches[0]
        with fails_on(rank, run.engine, 0, torch.OutOfMemoryError("given up")):
            failing(run, given, f"since rank {rank} failed in .* given up")


def both() -> None:
    hold(section("zb_v"), 1, torch.bfloat16, bad_batches)
    accumulations.hold("llama", section("1f1b"), 1, torch.bfloat16, ERROR)


def test_failures_and_accumulation():
    run_on_ranks(2, both, backend="hccl", sets_device=False)
