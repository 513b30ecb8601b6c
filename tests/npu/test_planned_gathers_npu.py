"""ZeRO 3 that gathers by a plan on simulated NPUs, whose streams run by themselves, against DeepSpeed's own gathers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bucketed_lives import PLAIN, Life
from gathered_lives import LIVES, SMALL, ZERO, gathers_of, steps
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


def second_engines() -> None:
    """The gradients of a model go to its later engine alone; the same numbers whatever streams do."""
    life = Life(steps, stage=3)
    found = []
    for zero in (SMALL | PLAIN, *(ZERO["small messages"],) * 3):
        first = life.engine(zero)
        steps(first)
        second = life.engine_of(first.module, zero)
        found.append(steps(second, first=3))
        with pytest.raises(RuntimeError, match="another engine was made of this model"):
            first.optimizer.step()
    for numbers in found[1:]:
        for each, other in zip(numbers, found[0], strict=True):
            assert torch.allclose(each, other, rtol=1e-5, atol=1e-7)


def test_a_second_engine_of_a_model():
    run_on_ranks(2, second_engines, backend="hccl")
