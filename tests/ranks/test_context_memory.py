"""A rank of context-parallel attention holds what its algorithm needs and no more, counted."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from context_memory import bytes_of, counted, needed, ring_needs
from ranks import run_on_ranks

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.ops.attention import CAUSAL, FULL
from ds_npu.parallel.context.axis import context_axis
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

pytestmark = pytest.mark.slow

SHAPES = [(8, 8, torch.float32), (8, 2, torch.float32), (8, 8, torch.bfloat16), (8, 1, torch.bfloat16)]
"""Heads, heads of keys, dtype."""


def holds_what_is_needed(algorithms: list[ContextAlgorithm]) -> None:
    """Within 1%: a merge has weights, some numbers for each row."""
    topology = Topology(Degrees(cp=dist.get_world_size()))
    for algorithm in algorithms:
        axis = context_axis(topology, algorithm)
        # Rows that see only some of the gathered keys are no call of torch's own kernel on the CPU.
        mask = FULL if algorithm.gather else CAUSAL
        for heads, key_heads, dtype in SHAPES:
            if algorithm.ulysses <= key_heads:
                wanted = needed(bytes_of(heads, key_heads, dtype), algorithm)
                found = counted(axis, heads, key_heads, dtype, mask)
                what = (
                    f"{algorithm}, {heads} heads, {key_heads} of keys, {dtype}: {found / wanted:.3f} of what is needed"
                )
                assert found == pytest.approx(wanted, rel=0.01), what


@pytest.mark.parametrize(
    "algorithms",
    [
        [ContextAlgorithm()],
        [ContextAlgorithm(2), ContextAlgorithm(1, 2, gather=True)],
        [ContextAlgorithm(1, 4), ContextAlgorithm(1, 4, gather=True)],
        [ContextAlgorithm(8), ContextAlgorithm(1, 8), ContextAlgorithm(1, 8, 2), ContextAlgorithm(2, 4)],
        [ContextAlgorithm(1, 16), ContextAlgorithm(1, 16, 4)],
    ],
    ids=lambda algorithms: str(algorithms[0].size),
)
def test_a_rank_holds_what_is_needed(algorithms):
    run_on_ranks(algorithms[0].size, holds_what_is_needed, algorithms)


def short_rings(size: int) -> None:
    """They have not so many blocks and sums on their way at a time; merging bfloat16 in forward may need more."""
    axis = context_axis(Topology(Degrees(cp=size)), ContextAlgorithm(1, size))
    for heads, key_heads, dtype in SHAPES:
        found = counted(axis, heads, key_heads, dtype, CAUSAL)
        assert found <= 1.01 * ring_needs(bytes_of(heads, key_heads, dtype))


@pytest.mark.parametrize("size", [2, 3])
def test_short_rings_hold_no_more(size):
    run_on_ranks(size, short_rings, size)
