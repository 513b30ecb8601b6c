"""ZeRO 3 that gathers by a plan on simulated NPUs, whose streams run by themselves, against DeepSpeed's own gathers."""

from __future__ import annotations

from dataclasses import replace

import torch
from bucketed_lives import PLAIN
from gathered_lives import LIVES, SMALL, ZERO, gathers_of
from ranks import run_on_ranks

from ds_npu.zero_ext.weight_gathers import WeightGathers

NAMES = ("steps", "bf16", "other layers", "evaluated", "changed", "recomputed")


def compare_all() -> None:
    """On two ranks, whose sums have one order."""
    for name in NAMES:
        life = replace(LIVES[name], stage=3)
        expected = life.live(life.engine(SMALL | PLAIN))
        for kind in ("small messages", "reuse"):
            engine = life.engine(ZERO[kind])
            assert isinstance(gathers_of(engine), WeightGathers)
            found = life.live(engine)
            assert len(found) == len(expected) > 10
            for index, (each, other) in enumerate(zip(found, expected, strict=True)):
                assert torch.allclose(each.nan_to_num(), other.nan_to_num(), rtol=1e-5, atol=1e-7), (name, kind, index)


def test_a_life_is_deepspeeds():
    run_on_ranks(2, compare_all, backend="hccl")
