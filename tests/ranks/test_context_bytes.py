"""What context-parallel attention sends is what its algorithm needs, byte for byte, counted at torch's collectives."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from context_rule import HEADS, Case, own
from context_traffic import Leaving, Traffic, backward, forward
from ranks import run_on_ranks
from wire import Wire

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.ops.attention import CAUSAL, FULL, Options, sliding
from ds_npu.parallel.context.attention import context_attention
from ds_npu.parallel.context.axis import ContextAxis, context_axis
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

pytestmark = pytest.mark.slow

KEPT = ("none", "half", "full")
ALGORITHMS = {
    2: [
        *(ContextAlgorithm(1, 2, kv_cache=kept) for kept in KEPT),
        *(ContextAlgorithm(2, kv_cache=kept) for kept in KEPT),
        *(ContextAlgorithm(1, 2, gather=True, kv_cache=kept) for kept in KEPT),
    ],
    3: [ContextAlgorithm(1, 3), ContextAlgorithm(3), ContextAlgorithm(1, 3, gather=True)],
    4: [ContextAlgorithm(1, 4), ContextAlgorithm(1, 4, 2), ContextAlgorithm(2, 2), ContextAlgorithm(4)],
    6: [ContextAlgorithm(3, 2), ContextAlgorithm(2, 3), ContextAlgorithm(3, 2, gather=True)],
    8: [
        ContextAlgorithm(1, 8),
        *(ContextAlgorithm(1, 8, 2, kv_cache=kept) for kept in KEPT),
        ContextAlgorithm(1, 8, 4),
        *(ContextAlgorithm(2, 4, kv_cache=kept) for kept in KEPT),
        ContextAlgorithm(2, 4, 2),
        ContextAlgorithm(4, 2, gather=True),
    ],
}
CASES = [
    Case("mha", CAUSAL),
    Case("gqa", CAUSAL, length=37),
    Case("mqa", FULL),
    Case("mla", CAUSAL, length=33),
    Case("gqa", CAUSAL, documents=(range(5), range(5, 32), range(34, 61))),
]
WINDOWS = [(Case("gqa", sliding(5), zigzag=False), 1), (Case("gqa", sliding(6), zigzag=False), 2)]
"""32 contiguous tokens on 8 ranks, 4 each; how many blocks before its own a rank needs: there the ring ends."""


def sent(axis: ContextAxis, case: Case, dtype: torch.dtype) -> tuple[Wire, Wire]:
    """Forward and backward."""
    tokens = case.tokens(axis.algorithm)
    *inputs, dout = (own(x, tokens, axis.rank) for x in case.inputs(dtype))
    leaves = [x.requires_grad_() for x in inputs]
    forth, back = Wire(), Wire()
    with forth:
        out = context_attention(*leaves, axis, Options(mask=case.mask), tokens)
    with back:
        torch.autograd.grad(out, leaves, dout)
    return forth, back


def traffic_of(axis: ContextAxis, case: Case, dtype: torch.dtype, last: int | None) -> Traffic:
    tokens = case.tokens(axis.algorithm)
    counts = tuple(case.batch * tokens.count(rank) for rank in range(axis.size))
    return Traffic(axis.algorithm, counts, *HEADS[case.heads], dtype.itemsize, last)


def some(leaving: Leaving) -> dict[tuple[str, int], int]:
    return {key: size for key, size in leaving.items() if size}


def is_the_minimum(axis: ContextAxis, case: Case, dtype: torch.dtype, last: int | None = None) -> None:
    traffic = traffic_of(axis, case, dtype, last)
    for wire, needed in zip(sent(axis, case, dtype), (forward, backward), strict=True):
        what = f"rank {axis.rank}, {needed.__name__}, {axis.algorithm}, {case}, {dtype}"
        assert some(wire.leaving) == some(needed(traffic, axis.rank)), what
        received = sum(size for name, size in wire.sent if name == "recv_")
        wanted = [needed(traffic, peer).items() for peer in range(axis.size)]
        assert received == _for(axis.rank, itertools.chain(*wanted)), what


def _for(rank: int, leaving: Iterable[tuple[tuple[str, int], int]]) -> int:
    """What others send to this rank, from one to one."""
    return sum(size for (kind, to), size in leaving if to == rank and kind.startswith("send"))


def every_algorithm() -> None:
    topology = Topology(Degrees(cp=dist.get_world_size()))
    for algorithm in ALGORITHMS[dist.get_world_size()]:
        axis = context_axis(topology, algorithm)
        for case in CASES:
            is_the_minimum(axis, case, torch.float64)
        is_the_minimum(axis, Case("gqa", CAUSAL, length=37), torch.bfloat16)
        if algorithm == ContextAlgorithm(1, 8):
            for case, last in WINDOWS:
                is_the_minimum(axis, case, torch.float64, last)


@pytest.mark.parametrize("size", list(ALGORITHMS))
def test_no_more_than_the_algorithm_needs_is_sent(size):
    run_on_ranks(size, every_algorithm)
