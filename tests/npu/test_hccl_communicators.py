"""Groups of ranks, what a communicator takes from the device, and calls it refuses."""

from __future__ import annotations

import math

import hccl_calls
import torch
import torch.distributed as dist
from hccl_values import reduced, same, value
from ranks import run_on_ranks, shared_memory_files


def groups_body() -> None:
    rank = dist.get_rank()
    disjoint = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    overlapping = [dist.new_group([0, 1, 2]), dist.new_group([2, 1, 3])]
    for group, members in zip(disjoint + overlapping, ([0, 1], [2, 3], [0, 1, 2], [1, 2, 3]), strict=True):
        if rank not in members:
            continue
        mine = value(rank, 5000, torch.float32).npu()
        dist.all_reduce(mine, group=group)
        same(mine, reduced([value(one, 5000, torch.float32) for one in members], dist.ReduceOp.SUM))
    works, buffers = [], []
    for group, members in zip(overlapping, ([0, 1, 2], [1, 2, 3]), strict=True):
        if rank in members:
            buffers.append((value(rank, 20000, torch.float32).npu(), members))
            works.append(dist.all_reduce(buffers[-1][0], group=group, async_op=True))
    for work in works:
        work.wait()
    for buffer, members in buffers:
        same(buffer, reduced([value(one, 20000, torch.float32) for one in members], dist.ReduceOp.SUM))


def test_disjoint_and_overlapping_groups():
    run_on_ranks(4, groups_body, backend="hccl")


def refused_body() -> None:
    dist.barrier()
    on_host, on_npu = torch.ones(8), torch.ones(8).npu()
    assert hccl_calls.call("HcclAllReduce", on_host, on_npu, 8, torch.float32, "sum") == 1
    assert "group_name_0, rank" in (said := hccl_calls.recent_error()) and "32 bytes lies in host memory" in said
    assert hccl_calls.call("HcclBroadcast", on_npu, 8, torch.float32, 9) == 1
    assert "has no rank 9 as root" in hccl_calls.recent_error()
    assert hccl_calls.call("HcclAllReduce", on_npu[:7], on_npu[1:], 7, torch.float32, "sum") == 1
    assert "overlap" in hccl_calls.recent_error()
    dist.all_reduce(on_npu)  # the refused calls were none
    same(on_npu, torch.full((8,), 2.0))


def test_buffers_and_roots_that_are_refused_at_the_call():
    run_on_ranks(2, refused_body, backend="hccl")


def split_body() -> None:
    """Two halves and an overlapping group made out of the world's communicator, several times with the same numbers."""
    rank = dist.get_rank()
    dist.barrier()
    for attempt in range(3):
        for number, members in enumerate(([0, 1], [3, 2], [1, 2, 3])):
            if rank not in members:
                continue
            child = hccl_calls.split(members, members.index(rank), number)
            mine = value(rank, 5000, torch.float32, seed=attempt).npu()
            hccl_calls.succeed("HcclAllReduce", mine, mine, 5000, torch.float32, "sum", on=child)
            values = [value(member, 5000, torch.float32, seed=attempt) for member in members]
            same(mine, reduced(values, dist.ReduceOp.SUM))
            hccl_calls.destroy(child)


def test_communicators_of_some_ranks_of_a_communicator():
    run_on_ranks(4, split_body, backend="hccl")


def one_process_body() -> None:
    """Two NPUs of one process, without torch's process group."""
    comms = hccl_calls.join_all([0, 1])
    given_by = [value(one, 20000, torch.float32) for one in range(2)]
    buffers = [given_by[one].to(f"npu:{one}") for one in range(2)]
    for one in range(2):
        with torch.npu.device(one):
            assert (
                hccl_calls.call("HcclAllReduce", buffers[one], buffers[one], 20000, torch.float32, "sum", on=comms[one])
                == 0
            )
    for one in range(2):
        torch.npu.synchronize(one)
        same(buffers[one], reduced(given_by, dist.ReduceOp.SUM))


def test_two_npus_of_one_process():
    run_on_ranks(1, one_process_body, backend="hccl")


def memory_body() -> None:
    torch.npu.synchronize()
    free = torch.npu.mem_get_info()[0]
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1).npu(), group=group)
    torch.npu.synchronize()
    assert math.isclose(free - torch.npu.mem_get_info()[0], 2 * 200 * 2**20, rel_tol=0.02)
    dist.destroy_process_group(group)
    assert math.isclose(torch.npu.mem_get_info()[0], free, rel_tol=0.001)


def test_a_communicator_takes_its_buffers_from_the_device_and_gives_them_back():
    before = shared_memory_files()
    run_on_ranks(2, memory_body, backend="hccl")
    assert shared_memory_files() == before
