"""Matrix products of sequence parallelism on NPUs, in pieces and fused, against float64 over all ranks' operands."""

from __future__ import annotations

import itertools
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch_npu
from agreement import agree, numbers
from ranks import run_on_ranks

from ds_npu.parallel.tensor import overlap_choice
from ds_npu.parallel.tensor.axis import SerialCollectives
from ds_npu.parallel.tensor.overlap_choice import OverlapChoice
from ds_npu.parallel.tensor.overlapped_matmul import Fused, Pipelined
from ds_npu.parallel.tensor.product import WeightLayout
from ds_npu.topology.machine import A2

DTYPES = (torch.bfloat16, torch.float16)
ROWS, INNER, OUTER = 6, 256, (8, 24)
FUSED_CALLS = ("npu_all_gather_base_mm", "npu_mm_reduce_scatter_base")


def collectives(kind: str, group: object, pieces: int) -> Pipelined | Fused:
    return Fused(group) if kind == "fused" else Pipelined(group, pieces)


def whole_of(shards: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(shards, dim=1)


def gather(kind: str, group: object, batch: int, pieces: int, dtype: torch.dtype) -> None:
    ranks = dist.get_process_group_ranks(group)
    shards = [numbers(batch, ROWS, INNER, seed=rank, dtype=dtype) for rank in ranks]
    matrices = [numbers(outer, INNER, seed=10 + outer, dtype=dtype).t() for outer in OUTER]
    mine = shards[dist.get_rank(group)].to(dtype).npu()
    # As views of weights [N, K].
    weights = [matrix.t().contiguous().to(dtype).npu() for matrix in matrices]
    whole, products = collectives(kind, group, pieces).gather_matmul(mine, [weight.t() for weight in weights])
    agree(whole, whole_of(shards), roundings=0)
    for product, matrix in zip(products, matrices, strict=True):
        agree(product, whole_of(shards) @ matrix, magnitude=whole_of(shards).abs() @ matrix.abs())


def scatter(kind: str, group: object, batch: int, pieces: int, dtype: torch.dtype, count: int) -> None:
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    pairs = [
        [
            (
                numbers(batch, len(ranks) * ROWS, INNER, seed=10 * each + index, dtype=dtype),
                numbers(INNER, OUTER[0], seed=100 + 10 * each + index, dtype=dtype),
            )
            for index in range(count)
        ]
        for each in ranks
    ]
    on_npu = [(x.to(dtype).npu(), matrix.to(dtype).npu()) for x, matrix in pairs[rank]]
    pending = collectives(kind, group, pieces).matmul_scatter(on_npu)
    del on_npu
    # What was in flight must not have been given to anyone else meanwhile.
    torch.full((batch, len(ranks) * ROWS, INNER), 7.0, dtype=dtype, device="npu")
    found = pending.wait()
    terms = list(itertools.chain.from_iterable(pairs))
    expected = torch.stack([x @ matrix for x, matrix in terms]).sum(0)
    magnitude = torch.stack([x.abs() @ matrix.abs() for x, matrix in terms]).sum(0)
    # Each product is rounded, and so is each partial sum.
    agree(
        found,
        expected.chunk(len(ranks), dim=1)[rank],
        magnitude.chunk(len(ranks), dim=1)[rank],
        roundings=2 * len(terms),
    )


def values_body(kind: str) -> None:
    """Over the world, and with four ranks over two groups of two, whose communicators are others."""
    world = dist.get_world_size()
    group = dist.group.WORLD
    if world == 4:
        group = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    called: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in FUSED_CALLS:
            monkeypatch.setattr(torch_npu, name, counting(called, name, vars(torch_npu)[name]))
        for dtype, batch, pieces in itertools.product(DTYPES, (1, 3), (1, 3, 4)):
            gather(kind, group, batch, pieces, dtype)
            scatter(kind, group, batch, pieces, dtype, 1)
    expected = len(DTYPES) * 2 * 3 if kind == "fused" else 0
    assert [called[name] for name in FUSED_CALLS] == [expected, expected]
    if kind == "pipelined":
        scatter(kind, group, 3, 2, torch.bfloat16, count=2)


def counting(called: Counter[str], name: str, function):
    def call(*args, **kwargs):
        called[name] += 1
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("kind", ["pipelined", "fused"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_values(world_size, kind):
    run_on_ranks(world_size, values_body, kind, backend="hccl")


def kinds_body() -> None:
    """Kernels where they take the operands on every rank, asked for or the fastest; else a warning, and pieces."""
    fused = OverlapChoice(dist.group.WORLD, A2, "fused")
    chosen = OverlapChoice(dist.group.WORLD, A2)
    x, matrix = torch.ones(1, 2, 256).half().npu(), torch.ones(256, 4).half().npu()
    even = [WeightLayout(shards=(256, 256))]
    for choice in (fused, chosen):
        assert isinstance(choice.of_gather(x, [matrix], even, True), Fused)
        assert isinstance(choice.of_scatter([(x, matrix)], even, False), Fused)
    for name, found in (
        ("the inner dimension is 128", (x[..., :128], [matrix[:128]], even, True)),
        ("torch.float32 is multiplied with torch.float32", (x.float(), [matrix.float()], even, True)),
        ("a sum of 2 products", ([(x, matrix)] * 2, even * 2, False)),
        ("the inner dimension is 255", ([(x, matrix)], [WeightLayout(shards=(255, 256))], False)),
    ):
        call = "of_gather" if isinstance(found[0], torch.Tensor) else "of_scatter"
        with mock.patch.object(overlap_choice, "warn_once") as warned:
            # Each rank gathers a shard of two tokens, which are pieces, and gets one of what is scattered.
            assert isinstance(getattr(fused, call)(*found), Pipelined if call == "of_gather" else SerialCollectives)
        assert f"pipelined, not fused: {name}" in warned.call_args.args[0]
        assert not isinstance(getattr(chosen, call)(*found), Fused)


def test_which_products_take_a_kernel():
    run_on_ranks(2, kinds_body, backend="hccl")
