"""Collectives that go wrong: ranks that disagree, die or never call. The others get an error that says so, soon."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from hccl_ranks import endings
from ranks import shared_memory_files

SOON_S = 10.0
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


def ones(count: int = 1024, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """On this rank's NPU, without a kernel."""
    return torch.ones(count, dtype=dtype).npu()


DISAGREEMENTS = {
    "operation": (
        lambda rank: dist.all_reduce(ones()) if rank == 0 else dist.broadcast(ones(), 0),
        "all_reduce(sum, 1024 x fp32)",
        "broadcast(1024 x fp32, root 0)",
    ),
    "count": (
        lambda rank: dist.all_reduce(ones(1000 + rank)),
        "all_reduce(sum, 1000 x fp32)",
        "all_reduce(sum, 1001 x fp32)",
    ),
    "type": (
        lambda rank: dist.all_reduce(ones(64, (torch.float16, torch.bfloat16)[rank])),
        "all_reduce(sum, 64 x fp16)",
        "all_reduce(sum, 64 x bf16)",
    ),
    "reduction": (
        lambda rank: dist.all_reduce(ones(), op=(SUM, MAX)[rank]),
        "all_reduce(sum, 1024 x fp32)",
        "all_reduce(max, 1024 x fp32)",
    ),
    "root": (
        lambda rank: dist.broadcast(ones(), rank),
        "broadcast(1024 x fp32, root 0)",
        "broadcast(1024 x fp32, root 1)",
    ),
    "order": (
        lambda rank: [dist.all_reduce(one) for one in [ones(1024), ones(5)][:: 1 - 2 * rank]],
        "all_reduce(sum, 1024 x fp32)",
        "all_reduce(sum, 5 x fp32)",
    ),
}


def disagreement_body(what: str) -> None:
    DISAGREEMENTS[what][0](dist.get_rank())


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_are_told_both_calls(what):
    calls = DISAGREEMENTS[what][1:]
    for rank, ended in enumerate(endings(2, disagreement_body, what)):
        assert ended.code == 3
        said = f"call 2 is {calls[rank]}, but rank {1 - rank} calls {calls[1 - rank]}"
        assert f"communicator group_name_0, rank {rank}: {said}" in ended.said


def uneven_body() -> None:
    dist.all_to_all_single(ones(6), ones(6), [3, 3], [3, 3] if dist.get_rank() == 0 else [2, 4])


def test_ranks_whose_counts_do_not_fit_are_told_whose():
    first, second = endings(2, uneven_body)
    assert "in call 2, all_to_all_v(fp32), rank 1 sends 2 elements to rank 0, which expects 3" in first.said
    assert "in call 2, all_to_all_v(fp32), rank 1 sends 2 elements to rank 0, which expects 3" in second.said


def message_body() -> None:
    if dist.get_rank() == 0:
        dist.recv(ones(10), 1)
    else:
        dist.send(ones(9), 0)


def test_a_message_of_another_size_is_an_error_on_both_sides():
    receiver, sender = endings(2, message_body)
    assert "receive number 1 from rank 1, 10 x fp32, but that rank sends 9 x fp32" in receiver.said
    assert re.search(r"rank 0 \(pid \d+\) has (stopped: receive number 1|exited)", sender.said)


def exiting_body() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.all_reduce(ones())


def test_a_rank_that_exits_ends_the_wait_of_all_others():
    first, second, third = endings(3, exiting_body)
    assert second.code == 7
    for ended in (first, third):
        assert ended.code == 3
        assert ended.waited_s < SOON_S
        assert re.search(
            r"rank 1 \(pid \d+\) has exited; this rank waits for it in call 2, all_reduce\(sum", ended.said
        )


def killed_body() -> None:
    many = ones(3_000_000)
    if dist.get_rank() == 1:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        for _ in range(20):
            dist.all_reduce(many)
        torch.npu.synchronize()


def test_a_rank_killed_amid_collectives_ends_the_others_and_leaves_nothing():
    before = shared_memory_files()
    first, second = endings(2, killed_body)
    assert second.code == -signal.SIGKILL
    assert first.code == 3
    assert re.search(r"rank 1 \(pid \d+\) has exited; this rank waits for it in call \d+, all_reduce", first.said)
    assert first.waited_s < SOON_S
    assert shared_memory_files() == before


def absent_body() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(ones())
    else:
        time.sleep(6)


def test_a_rank_that_never_calls_is_named_when_the_time_is_over():
    first, second = endings(2, absent_body, HCCL_EXEC_TIMEOUT="2")
    assert "rank 1 (whose last call is 1, all_reduce(sum, 1 x fp32)) did not come within 2 s" in first.said
    assert "this rank waits in call 2, all_reduce(sum, 1024 x fp32)" in first.said
    assert 2 <= first.waited_s < 5
    assert second.code == 0


def never_sent_body() -> None:
    if dist.get_rank() == 0:
        for _ in range(2):
            dist.recv(ones(4), 1)
    else:
        dist.send(ones(4), 0)
        time.sleep(5)


def test_a_message_that_never_comes_is_named():
    first, second = endings(2, never_sent_body, HCCL_EXEC_TIMEOUT="2")
    waits = "this rank waits in receive number 2 from rank 1, 4 x fp32"
    assert f"within 2 s (HCCL_EXEC_TIMEOUT); {waits}" in first.said
    assert second.code == 0


def stopped_body() -> None:
    if dist.get_rank() == 1:
        dist.all_reduce(ones(2), op=MAX)
        try:
            torch.npu.synchronize()
        finally:
            time.sleep(4)
    dist.all_reduce(ones())


def test_an_error_is_told_while_the_rank_that_has_it_lives_on():
    first, second = endings(2, stopped_body)
    assert first.waited_s < 3
    assert "call 2 is all_reduce(sum, 1024 x fp32), but rank 1 calls all_reduce(max, 2 x fp32)" in first.said
    assert "call 2 is all_reduce(max, 2 x fp32), but rank 0 calls all_reduce(sum, 1024 x fp32)" in second.said


def third_body() -> None:
    """Ranks 0 and 1 disagree about a part; rank 2 can only wait for them."""
    rank = dist.get_rank()
    to_rank_1 = 2 if rank == 0 else 1
    dist.all_to_all_single(ones(3), ones(2 + to_rank_1), [1, 1, 1], [1, to_rank_1, 1])
    try:
        torch.npu.synchronize()
    finally:
        if rank != 2:
            time.sleep(3)


def test_a_rank_that_does_nothing_wrong_is_told_why_the_others_stopped():
    third = endings(3, third_body)[2]
    assert third.code == 3
    assert third.waited_s < 3
    assert "rank 0 sends 2 elements to rank 1, which expects 1" in third.said
    assert re.search(r"rank [01] \(pid \d+\) has stopped", third.said)


def unjoined_body() -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.all_reduce(ones(), group=group)
    else:
        time.sleep(5)


def test_a_rank_that_does_not_join_is_named():
    first, second = endings(2, unjoined_body, HCCL_CONNECT_TIMEOUT="2")
    assert "of its 2 ranks rank 1 did not join within 2 s (HCCL_CONNECT_TIMEOUT)" in first.said
    assert second.code == 0


def destroyed_body() -> None:
    if dist.get_rank() == 0:
        dist.destroy_process_group()
        time.sleep(3)
    else:
        dist.all_reduce(ones())


def test_a_rank_that_destroys_the_communicator_ends_the_wait_of_the_others():
    _, second = endings(2, destroyed_body)
    assert second.code == 3
    assert second.waited_s < 3
    assert re.search(r"rank 0 \(pid \d+\) has destroyed the communicator; this rank waits", second.said)
