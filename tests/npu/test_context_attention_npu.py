"""Attention over tokens sharded over NPUs, through npu_fusion_attention and HCCL, against one process in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from context_cases import CASES, DTYPES, FEW_CASES, MASKS, algorithms, axes, check, kept_weights
from context_rule import Case
from ranks import run_on_ranks

from ds_npu.parallel.context.kernel_calls import RangeSelection

RUNS = [(world, name) for world in (2, 4) for name in algorithms(world)]
DROPOUT_P = 0.3


def values_body(name: str) -> None:
    usual = algorithms(dist.get_world_size())[name]
    kept = [replace(usual, kv_cache=kv_cache) for kv_cache in ("none", "half", "full")]
    for axis in axes(usual, *kept):
        for case in CASES if axis.algorithm is usual else FEW_CASES:
            for dtype in DTYPES:
                check(axis, case, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), RUNS)
def test_values(world, name):
    run_on_ranks(world, values_body, name, backend="hccl")


def dropout_body(name: str) -> None:
    (axis,) = axes(algorithms(dist.get_world_size())[name])
    for number, (heads, mask) in enumerate((("gqa", "causal"), ("mla", "full"), ("mha", "window"), ("mqa", "packed"))):
        case = Case(heads, **MASKS[mask])
        seed = 10 * number + axis.rank
        torch.npu.manual_seed(seed)
        kept = kept_weights(axis, case, DROPOUT_P)
        for dtype in DTYPES:
            torch.npu.manual_seed(seed)
            check(axis, case, dtype, kept, DROPOUT_P)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), RUNS)
def test_both_passes_drop_the_same_weights(world, name):
    run_on_ranks(world, dropout_body, name, backend="hccl")


def test_the_host_does_not_wait_for_the_stream_when_it_hands_over_places():
    one = torch.ones(1 << 23, device="npu")  # In virtual time a sum of it takes longer than its dispatch.
    RangeSelection([range(1), range(2, 3)]).index(one.device)
    torch.npu.synchronize()
    for _ in range(40):
        one = one + one
    done = torch.npu.current_stream().record_event()
    found = RangeSelection([range(2), range(5, 8)]).index(one.device)
    assert not done.query()
    assert found.cpu().tolist() == [0, 1, 5, 6, 7]
