"""Ranks that die in a collective, started as a user starts them: what the others say, and that nothing is left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import simulated
from ranks import shared_memory_files

pytestmark = pytest.mark.slow  # the libraries are compiled first, if they are not yet

DEADLINE_S = 100.0
PRELUDE = """
import os, signal, sys, time
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
torch.npu.set_device(DEVICE)
dist.init_process_group(
    "hccl", init_method="file://STORE", rank=rank, world_size=int(os.environ["WORLD_SIZE"])
)
a = torch.ones(1024, device="npu")


def wait():
    global begun
    begun = time.monotonic()
    try:
        torch.npu.synchronize()
    except RuntimeError as error:
        print("after", round(time.monotonic() - begun, 1), "s:", str(error).replace(chr(10), " "), flush=True)
        raise SystemExit(3)


dist.all_reduce(a)
wait()
"""


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code and what it printed."""

    code: int
    out: str
    err: str


def run_ranks(
    world: int,
    body: str,
    tmp_path: Path,
    *options: str,
    after_first: Callable[[], None] = bool,
    device: str = "rank",
    **environ: str,
) -> list[Ended]:
    """Run ``body`` after PRELUDE on each of ``world`` ranks; all must end within DEADLINE_S. Call ``after_first`` when
    rank 0 has ended.

    torch_npu's watchdog kills a process whose communicator has failed; it is off unless ``environ`` says otherwise, so
    that the error is seen where the program waits.
    """
    code = PRELUDE.replace("STORE", str(tmp_path / "store")).replace("DEVICE", device) + textwrap.dedent(body)
    command = [sys.executable, "-m", "ds_npu.cli.main", "sim", "--devices", str(world), *options]
    processes = []
    for rank in range(world):
        variables = {
            **os.environ,
            "TORCH_HCCL_ASYNC_ERROR_HANDLING": "0",
            **environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
        }
        processes.append(
            subprocess.Popen(
                [*command, "--", sys.executable, "-c", code],
                cwd=simulated.ROOT,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = []
    try:
        deadline = time.monotonic() + DEADLINE_S
        for process in processes:
            out, err = process.communicate(timeout=max(deadline - time.monotonic(), 1))
            ended.append(Ended(process.returncode, out, err))
            if len(ended) == 1:
                after_first()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return ended


def test_a_rank_killed_amid_collectives_leaves_nothing_behind(tmp_path):
    body = """
    b = torch.ones(3_000_000, device="npu")
    if rank == 1:
        import threading
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        for _ in range(20):
            dist.all_reduce(b)
        wait()
    """
    before = shared_memory_files()
    begun = time.monotonic()
    first, second = run_ranks(2, body, tmp_path)
    assert second.code == -9
    assert first.code == 3
    assert re.search(r"rank 1 \(pid \d+\) has exited; this rank waits for it in call \d+, all_reduce", first.out), first
    assert time.monotonic() - begun < 60
    assert shared_memory_files() == before
    assert processes_of(tmp_path) == []


def processes_of(tmp_path: Path) -> list[Path]:
    """Processes whose command line names the test's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes()
        except OSError:  # has ended since
            continue
        if str(tmp_path).encode() in line:
            found.append(entry.parent)
    return found


def test_a_rank_killed_by_a_planted_fault(tmp_path):
    first, second = run_ranks(2, "dist.all_reduce(a)\nwait()", tmp_path, "--fault", "HcclAllReduce:2@1=exit")
    assert second.code == -9
    assert "has exited; this rank waits for it in call 2" in first.out, first


@pytest.mark.parametrize("handling", ["0", "1"])
def test_a_process_with_a_failed_collective_ends_in_time(handling, tmp_path):
    """Also where torch_npu's watchdog takes the process down, which it does by default."""
    body = """
    if rank == 1:
        os._exit(0)
    for _ in range(5):
        dist.all_reduce(a, async_op=True)
    time.sleep(2)
    dist.destroy_process_group()
    """
    begun = time.monotonic()
    first, _ = run_ranks(2, body, tmp_path, TORCH_HCCL_ASYNC_ERROR_HANDLING=handling)
    assert time.monotonic() - begun < 60
    if handling == "1":
        assert first.code != 0
        assert "has exited; this rank waits for it in call 2" in first.err, first


def test_a_process_whose_collective_nobody_joins_ends_after_the_timeout(tmp_path):
    """torch_npu itself waits for the device before it destroys the communicator, as it does on hardware."""
    alone = tmp_path / "alone"
    alone.touch()
    body = f"""
    if rank == 0:
        dist.all_reduce(a, async_op=True)
        dist.destroy_process_group()
    while rank == 1 and os.path.exists("{alone}"):
        time.sleep(0.1)
    """
    first, second = run_ranks(2, body, tmp_path, after_first=alone.unlink, HCCL_EXEC_TIMEOUT="3")
    assert "within 3 s (HCCL_EXEC_TIMEOUT)" in first.err, first
    assert second.code == 0, second


def test_two_ranks_on_one_npu_are_an_error_that_names_them(tmp_path):
    named = (
        r"rank 0 \(pid \d+, NPU 0\) and rank 1 \(pid \d+, NPU 0\) are on one NPU, and each rank needs one of its own"
    )
    for each in run_ranks(2, "", tmp_path, device="0"):
        assert each.code == 1
        assert re.search(rf"communicator \w+: {named}\. What to do: call torch\.npu\.set_device", each.err), each


LAUNCHER = """
import os, subprocess, sys
variables = [{"RANK": rank, "ASCEND_RT_VISIBLE_DEVICES": rank} for rank in "01"]
processes = [subprocess.Popen(sys.argv[1:], env={**os.environ, **each}) for each in variables]
sys.exit(max(process.wait() for process in processes))
"""


def test_two_ranks_that_each_see_one_npu_are_on_two(tmp_path):
    code = PRELUDE.replace("STORE", str(tmp_path / "store")).replace("DEVICE", "0")
    # One write each: where Python is unbuffered, two processes' prints run into each other.
    code += "os.write(1, f'{a[0].item()}{chr(10)}'.encode())"
    command = [sys.executable, "-c", LAUNCHER, sys.executable, "-c", code]
    done = simulated.sim("--devices", "2", "--", *command, WORLD_SIZE="2")
    assert simulated.printed(done) == ["2.0", "2.0"]


def test_a_wait_for_a_communicator_that_nobody_opens_is_an_error_that_says_who_waits_for_whom(tmp_path):
    """torch_npu waits in the store, half an hour, and calls nothing of HCCL meanwhile."""
    body = """
    if rank == 1:
        a = torch.ones(1024, device="npu:0")
    dist.all_reduce(a)
    wait()
    """
    begun = time.monotonic()
    first, second = run_ranks(2, body, tmp_path, HCCL_CONNECT_TIMEOUT="3")
    assert time.monotonic() - begun < 60
    waits = (
        r"it has waited \d+ s for a communicator that no other rank opens, while rank 0 \(pid \d+, NPU 0\) waits in "
        r"call 2, all_reduce\(sum, 1024 x fp32\), of communicator \w+ for rank 1 \(pid \d+, NPU 1\)\. "
        r".*What to do: call torch\.npu\.set_device"
    )
    assert second.code == 1 and re.search(rf"ds_npu sim: process \d+ cannot go on: {waits}", second.err), second
    assert first.code == 3 and re.search(rf"rank 1 \(pid \d+\) has stopped: {waits}", first.out), first


def test_a_wait_for_a_communicator_of_ranks_that_have_ended_ends_too(tmp_path):
    body = """
    group = dist.new_group([0, 1])
    if rank == 0:
        os._exit(0)
    dist.all_reduce(a, group=group)
    """
    first, second = run_ranks(2, body, tmp_path, HCCL_CONNECT_TIMEOUT="3")
    assert first.code == 0
    assert second.code == 1 and re.search(r"while all other ranks of communicator \w+ have exited", second.err), second


def test_a_rank_that_is_late_is_waited_for(tmp_path):
    """With the next communicator, and with the next call while its host does something else."""
    body = """
    group = dist.new_group([0, 1])
    if rank == 0:
        time.sleep(6)
    dist.all_reduce(a, group=group)
    wait()
    dist.all_reduce(a)
    if rank == 1:
        time.sleep(6)
    dist.all_reduce(a)
    wait()
    print(a[0].item())
    """
    for each in run_ranks(2, body, tmp_path, HCCL_CONNECT_TIMEOUT="2"):
        assert (each.code, each.out.split()) == (0, ["16.0"]), each


def test_communicators_buffers_beyond_the_capacity_are_torchs_out_of_memory(tmp_path):
    store = tmp_path / "store"
    body = f"""
    import torch, torch.distributed as dist
    torch.npu.set_device(0)
    dist.init_process_group("hccl", init_method="file://{store}", rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(4).npu())
    except torch.OutOfMemoryError as error:
        print(str(error).replace(chr(10), " "))
    """
    (said,) = simulated.printed(simulated.python(body, "--memory", "512MiB", HCCL_BUFFSIZE="300"))
    assert "Failed to allocate two buffers of 300 MiB (HCCL_BUFFSIZE) for a communicator" in said
    assert "0.50 GiB" in said
