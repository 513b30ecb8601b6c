"""Muon on simulated NPUs, whose streams run by themselves: pieces travel beside iterations, in fp16 and bf16."""

from __future__ import annotations

import muon_lives as lives
import muon_rule
import torch
from muon_rule import MuonCase
from ranks import run_on_ranks

TENSOR = {"parallel": {"tensor": 2}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}, "bf16": {"enabled": False}}


def in_small_waves() -> None:
    """Two waves and more, and several buckets, as a large model has them."""
    from ds_npu.parallel.whole_matrices import plan

    plan.WAVE = 3000
    cases = [MuonCase("llama", stage, TENSOR, torch.bfloat16) for stage in (0, 1, 2, 3)]
    small = {"reduce_bucket_size": 2500, "allgather_bucket_size": 2500}
    parts = [MuonCase("llama", stage, {"parallel": {}}, torch.bfloat16, zero=small) for stage in (1, 2)]
    muon_rule.hold_as_shipped([*cases, *parts])


def skipped() -> None:
    lives.skip_steps([(MuonCase("llama", stage, TENSOR, torch.float16), FP16) for stage in (0, 1, 2, 3)])


def test_as_one_process():
    run_on_ranks(2, in_small_waves, deadline_s=600.0, backend="hccl", sets_device=False)


def test_skipped_steps_in_fp16():
    run_on_ranks(2, skipped, backend="hccl", sets_device=False)
