"""ZeRO 1 and 2 in buckets on simulated NPUs, whose streams run by themselves, against DeepSpeed's own code."""

from __future__ import annotations

import torch
from bucketed_lives import LIVES, PLAIN
from ranks import run_on_ranks

from ds_npu.zero_ext.bucketed_zero import BUCKETED

NAMES = ("ZeRO 1", "ZeRO 2, bf16", "full values", "values read", "not finite", "moved", "reentrant")


def compare_all() -> None:
    """On two ranks, whose sums have one order."""
    for name in NAMES:
        life = LIVES[name]
        plain, bucketed = life.engine(PLAIN), life.engine({})
        assert BUCKETED.get(bucketed.optimizer) is not None
        expected, found = life.live(plain), life.live(bucketed)
        assert len(found) == len(expected) > 10
        for index, (each, other) in enumerate(zip(found, expected, strict=True)):
            # NPUs sum the squares of the norm, by which gradients are scaled, in float32, and here by runs of weights.
            assert torch.allclose(each.nan_to_num(), other.nan_to_num(), rtol=1e-5, atol=1e-7), (name, index)


def test_a_life_in_buckets_is_deepspeeds():
    run_on_ranks(2, compare_all, backend="hccl")
