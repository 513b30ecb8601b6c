"""Collectives between NPUs: each rank gets what the plain computation over all ranks' inputs gives, to the bit."""

from __future__ import annotations

import itertools

import hccl_calls
import pytest
import torch
import torch.distributed as dist
from hccl_values import COUNTS, LARGE, MOVABLE, REDUCIBLE, REDUCTIONS, everyone, reduced, same, value
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_on_ranks


def reductions_body() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype, op in itertools.product(REDUCIBLE, REDUCTIONS):
        for count in COUNTS:
            mine = value(rank, count, dtype).npu()
            dist.all_reduce(mine, op=op)
            same(mine, reduced(everyone(count, dtype), op))
            for root in range(world):
                at_root = value(rank, count, dtype).npu()
                dist.reduce(at_root, root, op=op)
                if rank == root:
                    same(at_root, reduced(everyone(count, dtype), op))
            whole = value(rank, count * world, dtype).npu()
            part = torch.empty(count, dtype=dtype, device="npu")
            dist.reduce_scatter_tensor(part, whole, op=op)
            expected = reduced([one.chunk(world)[rank] for one in everyone(count * world, dtype)], op)
            same(part, expected)
            same(whole, value(rank, count * world, dtype))
            in_place = whole.chunk(world)[rank]
            dist.reduce_scatter_tensor(in_place, whole, op=op)
            same(in_place, expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_reductions_of_all_dtypes_and_operations(world_size):
    run_on_ranks(world_size, reductions_body, backend="hccl")


def movements_body() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype, count in itertools.product(MOVABLE, COUNTS):
        given_by = everyone(count, dtype)
        for root in range(world):
            buffer = value(rank, count, dtype).npu()
            dist.broadcast(buffer, root)
            same(buffer, given_by[root])
            parts = [value(root, count, dtype, seed=1 + to).npu() for to in range(world)] if rank == root else None
            mine = torch.empty(count, dtype=dtype, device="npu")
            dist.scatter(mine, parts, root)
            same(mine, value(root, count, dtype, seed=1 + rank))
        whole = torch.empty(count * world, dtype=dtype, device="npu")
        dist.all_gather_into_tensor(whole, given_by[rank].npu())
        same(whole, torch.cat(given_by))
        in_place = torch.zeros(count * world, dtype=dtype, device="npu")
        in_place.chunk(world)[rank].copy_(given_by[rank].npu())
        dist.all_gather_into_tensor(in_place, in_place.chunk(world)[rank])
        same(in_place, torch.cat(given_by))
        listed = [torch.empty(count, dtype=dtype, device="npu") for _ in range(world)]
        dist.all_gather(listed, given_by[rank].npu())
        for found, expected in zip(listed, given_by, strict=True):
            same(found, expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_broadcast_scatter_and_all_gather_of_all_dtypes(world_size):
    run_on_ranks(world_size, movements_body, backend="hccl")


def one_exchange(counts: list[list[int]], dtype: torch.dtype) -> None:
    """Rank i sends counts[i][j] elements to rank j."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sent = [value(source, sum(counts[source]), dtype) for source in range(world)]
    arrives = [counts[source][rank] for source in range(world)]
    found = torch.empty(sum(arrives), dtype=dtype, device="npu")
    dist.all_to_all_single(found, sent[rank].npu(), arrives, counts[rank])
    same(found, torch.cat([sent[source].split(counts[source])[rank] for source in range(world)]))


def examples_body(examples: int) -> None:
    """hypothesis draws the same examples on all ranks: it is derandomized."""
    world = dist.get_world_size()
    counts = st.lists(st.lists(st.integers(0, 40), min_size=world, max_size=world), min_size=world, max_size=world)

    @settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    @given(counts, st.sampled_from(MOVABLE))
    def all_to_all(drawn: list[list[int]], dtype: torch.dtype) -> None:
        one_exchange(drawn, dtype)

    @settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    @given(st.integers(0, 70000), st.integers(0, 5), st.sampled_from(REDUCIBLE), st.sampled_from(list(REDUCTIONS)))
    def all_reduce(count: int, offset: int, dtype: torch.dtype, op: dist.ReduceOp) -> None:
        buffer = torch.zeros(offset + count, dtype=dtype, device="npu")
        view = buffer[offset:]
        view.copy_(value(dist.get_rank(), count, dtype).npu())
        dist.all_reduce(view, op=op)
        same(view, reduced(everyone(count, dtype), op))

    all_to_all()
    all_reduce()


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_counts_and_dtypes(world_size):
    run_on_ranks(world_size, examples_body, 60, backend="hccl")


def even_all_to_all_body() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype, count in itertools.product(MOVABLE, COUNTS):
        found = torch.empty(count * world, dtype=dtype, device="npu")
        dist.all_to_all_single(found, value(rank, count * world, dtype).npu())
        same(found, torch.cat([one.chunk(world)[rank] for one in everyone(count * world, dtype)]))
    lists = [list(value(source, 6 * world, torch.float32).chunk(world)) for source in range(world)]
    arrived = [torch.empty(6, device="npu") for _ in range(world)]
    dist.all_to_all(arrived, [one.npu() for one in lists[rank]])
    for source in range(world):
        same(arrived[source], lists[source][rank])


def test_all_to_all():
    run_on_ranks(2, even_all_to_all_body, backend="hccl")


def large_body() -> None:
    rank = dist.get_rank()
    mine = value(rank, LARGE, torch.float32).npu()
    dist.all_reduce(mine)
    same(mine, reduced(everyone(LARGE, torch.float32), dist.ReduceOp.SUM))
    half = value(rank, LARGE, torch.bfloat16).npu()
    dist.all_reduce(half)
    same(half, reduced(everyone(LARGE, torch.bfloat16), dist.ReduceOp.SUM))
    whole = torch.empty(LARGE * dist.get_world_size(), device="npu")
    dist.all_gather_into_tensor(whole, value(rank, LARGE, torch.float32).npu())
    same(whole, torch.cat(everyone(LARGE, torch.float32)))
    one_exchange([[LARGE // 2, 11], [5, LARGE]], torch.float32)


def test_large_messages():
    run_on_ranks(2, large_body, backend="hccl")


def averages_and_bools_body() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = value(rank, 100, torch.float32).npu()
    dist.all_reduce(mine, op=dist.ReduceOp.AVG)
    same(mine, reduced(everyone(100, torch.float32), dist.ReduceOp.SUM) / world)
    flags = value(rank, 100, torch.bool).npu()
    dist.all_reduce(flags)
    same(flags, torch.stack(everyone(100, torch.bool)).any(0))
    table = value(rank, 100, torch.float32).view(10, 10).npu()
    columns = table.t()  # not contiguous: gathered from a copy
    gathered = [torch.empty(10, 10, device="npu") for _ in range(world)]
    dist.all_gather(gathered, columns.contiguous())
    same(gathered[1 - rank], value(1 - rank, 100, torch.float32).view(10, 10).t().contiguous())


def test_averages_bools_and_transposed_tensors():
    run_on_ranks(2, averages_and_bools_body, backend="hccl")


def messages_body() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % world, (rank - 1) % world
    for dtype, count in itertools.product(MOVABLE, (1, 1000, 50001)):
        found = torch.empty(count, dtype=dtype, device="npu")
        if rank == 0:
            dist.send(value(rank, count, dtype).npu(), after)
            dist.recv(found, before)
        else:
            dist.recv(found, before)
            dist.send(value(rank, count, dtype).npu(), after)
        same(found, value(before, count, dtype))
    # Several messages to each of the others; the receives come first, in the order of the ranks.
    found = {
        (source, i): torch.empty(100 + i, device="npu") for source in range(world) for i in range(3) if source != rank
    }
    receives = [dist.P2POp(dist.irecv, buffer, source) for (source, _), buffer in found.items()]
    sends = [
        dist.P2POp(dist.isend, value(rank, 100 + i, torch.float32, seed=i).npu(), target)
        for target in range(world)
        for i in range(3)
        if target != rank
    ]
    order = receives + sends if rank % 2 else sends + receives
    for work in dist.batch_isend_irecv(order):
        work.wait()
    for (source, i), buffer in found.items():
        same(buffer, value(source, 100 + i, torch.float32, seed=i))


@pytest.mark.parametrize("world_size", [2, 4])
def test_messages_between_two_ranks(world_size):
    run_on_ranks(world_size, messages_body, backend="hccl")


def asynchronous_body() -> None:
    rank = dist.get_rank()
    pending = []
    for seed in range(40):
        buffer = value(rank, 3000, torch.float32, seed).npu()
        pending.append((buffer, dist.all_reduce(buffer, async_op=True)))
    for seed, (buffer, work) in enumerate(pending):
        work.wait()
        doubled = buffer + buffer
        same(doubled, 2 * reduced(everyone(3000, torch.float32, seed), dist.ReduceOp.SUM))
    buffers = [value(rank, 50 + i, torch.float32, seed=i).npu() for i in range(5)]
    with dist._coalescing_manager(device=torch.device("npu", torch.npu.current_device()), async_ops=True) as manager:
        for buffer in buffers:
            dist.all_reduce(buffer)
    manager.wait()
    for i, buffer in enumerate(buffers):
        same(buffer, reduced(everyone(50 + i, torch.float32, seed=i), dist.ReduceOp.SUM))


def test_collectives_in_flight_at_once_and_coalesced():
    run_on_ranks(2, asynchronous_body, backend="hccl")


def empty_body() -> None:
    rank = dist.get_rank()
    nothing = torch.empty(0, device="npu")
    dist.all_reduce(nothing)
    dist.broadcast(nothing, 0)
    dist.all_gather_into_tensor(torch.empty(0, device="npu"), nothing)
    one_exchange([[0, 0], [0, 3]], torch.float32)
    dist.barrier()
    one = torch.ones(1, device="npu") * rank
    dist.all_reduce(one)
    assert one.item() == 1


def test_empty_tensors():
    run_on_ranks(2, empty_body, backend="hccl")


def eight_body() -> None:
    one_exchange([[(3 * i + j) % 7 for j in range(8)] for i in range(8)], torch.float32)
    mine = value(dist.get_rank(), 40001, torch.bfloat16).npu()
    dist.all_reduce(mine)
    same(mine, reduced(everyone(40001, torch.bfloat16), dist.ReduceOp.SUM))


@pytest.mark.skipif(torch.npu.device_count() < 8, reason="needs 8 NPUs")
def test_eight_ranks():
    run_on_ranks(8, eight_body, backend="hccl")


# What only HCCL's own functions can be asked for.


def other_types_body() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    top = {torch.uint16: 2**16, torch.uint32: 2**32, torch.uint64: 2**64, torch.uint8: 2**8}
    python = {"sum": lambda a, b: a + b, "prod": lambda a, b: a * b, "max": max, "min": min}
    for (dtype, limit), (reduction, combine) in itertools.product(top.items(), python.items()):
        given_by = [[(limit * (7 * i + 3 * one + 1) // 23) % limit for i in range(100)] for one in range(world)]
        mine = torch.tensor(given_by[rank], dtype=dtype).npu()
        found = torch.empty_like(mine)
        hccl_calls.succeed("HcclAllReduce", mine, found, 100, dtype, reduction)
        expected = list(given_by[0])
        for other in given_by[1:]:
            expected = [combine(a, b) % limit for a, b in zip(expected, other, strict=True)]
        assert found.cpu().tolist() == expected, (dtype, reduction)
    doubles = value(rank, 30000, torch.float64).npu()
    found = torch.empty_like(doubles)
    hccl_calls.succeed("HcclAllReduce", doubles, found, 30000, torch.float64, "sum")
    same(found, sum(everyone(30000, torch.float64)[1:], value(0, 30000, torch.float64)))


def test_reductions_of_unsigned_integers_and_fp64():
    run_on_ranks(2, other_types_body, backend="hccl")


def uneven_body() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    counts = [5, 0, 17, 300][:world]
    starts = [20 + sum(counts[:one]) + 3 * one for one in range(world)]  # with gaps between the parts
    end = starts[-1] + counts[-1]
    gathered = torch.full((end,), -1.0).npu()
    mine = value(rank, max(counts[rank], 1), torch.float32).npu()
    hccl_calls.succeed("HcclAllGatherV", mine, counts[rank], gathered, counts, starts, torch.float32)
    expected = torch.full((end,), -1.0)
    for one in range(world):
        expected[starts[one] : starts[one] + counts[one]] = value(one, max(counts[one], 1), torch.float32)[
            : counts[one]
        ]
    same(gathered, expected)
    sent = [value(one, end, torch.float32, seed=2) for one in range(world)]
    part = torch.empty(max(counts[rank], 1), device="npu")
    hccl_calls.succeed("HcclReduceScatterV", sent[rank].npu(), counts, starts, part, counts[rank], torch.float32, "sum")
    own = slice(starts[rank], starts[rank] + counts[rank])
    same(part[: counts[rank]], reduced([one[own] for one in sent], dist.ReduceOp.SUM))
    matrix = [[(5 * i + 3 * j) % 11 for j in range(world)] for i in range(world)]
    given_by = [value(one, sum(matrix[one]), torch.int64) for one in range(world)]
    found = torch.empty(sum(row[rank] for row in matrix), dtype=torch.int64, device="npu")
    hccl_calls.succeed(
        "HcclAlltoAllVC", given_by[rank].npu(), list(itertools.chain(*matrix)), torch.int64, found, torch.int64
    )
    same(found, torch.cat([given_by[one].split(matrix[one])[rank] for one in range(world)]))


@pytest.mark.parametrize("world_size", [2, 4])
def test_collectives_with_counts_and_gaps(world_size):
    run_on_ranks(world_size, uneven_body, backend="hccl")


def overlapping_body() -> None:
    """A receive buffer on the send buffer, where others still read."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    count = 9000
    for _ in range(5):
        buffer = value(rank, count * world, torch.float32).npu()
        hccl_calls.succeed("HcclAlltoAll", buffer, count, torch.float32, buffer, count, torch.float32)
        same(buffer, torch.cat([one.chunk(world)[rank] for one in everyone(count * world, torch.float32)]))
        buffer = value(rank, count * world, torch.float32).npu()
        hccl_calls.succeed("HcclReduceScatter", buffer, buffer, count, torch.float32, "sum")
        expected = reduced(
            [one.chunk(world)[rank] for one in everyone(count * world, torch.float32)], dist.ReduceOp.SUM
        )
        same(buffer[:count], expected)
        whole = torch.cat([value(rank, count, torch.float32), torch.zeros(count * (world - 1))]).npu()
        hccl_calls.succeed("HcclAllGather", whole, whole, count, torch.float32)
        same(whole, torch.cat(everyone(count, torch.float32)))


def test_buffers_that_overlap():
    run_on_ranks(2, overlapping_body, backend="hccl")
