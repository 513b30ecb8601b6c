"""ZeRO 1 and 2 in buckets, against DeepSpeed's own reductions and gathers to the bit, and against plain PyTorch."""

from __future__ import annotations

import torch
from bucketed_lives import LIVES, PLAIN
from ranks import run_on_ranks

from ds_npu.zero_ext.bucketed_zero import BUCKETED


def compare(name: str) -> None:
    """On two ranks, whose sums have one order."""
    life = LIVES[name]
    plain, bucketed = life.engine(PLAIN), life.engine({})
    assert BUCKETED.get(plain.optimizer) is None
    assert len(BUCKETED.get(bucketed.optimizer).gradients._order) > 3
    expected, found = life.live(plain), life.live(bucketed)
    assert len(found) == len(expected) > 10
    for index, (each, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(each.nan_to_num(), other.nan_to_num()), (name, index, each, other)


def compare_all() -> None:
    for name in LIVES:
        compare(name)


def test_a_life_in_buckets_is_deepspeeds_to_the_bit():
    run_on_ranks(2, compare_all)
