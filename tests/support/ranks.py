"""Runs a function on every rank of a small world: forkserver, one thread a rank, never longer than a deadline.

The forkserver imports what they need once (``preloaded``).
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ds_npu.zero_ext import bucket_plan, gather_plan

DEADLINE_S = 180.0

PRELOADED = os.environ.get("RANKS_PRELOAD", "preloaded")
"""The module of this folder that imports what ranks need."""

multiprocessing.set_forkserver_preload(["ds_npu", "hypothesis", "pytest", "deepspeed", "ranks", PRELOADED])


@functools.cache
def _start_forkserver() -> None:
    """Start it where it finds this folder: Python 3.11's does not get sys.path, and what it misses it leaves out."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before]))
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


@dataclass(frozen=True)
class World:
    """What every rank of a world has in common."""

    size: int
    backend: str
    sets_device: bool
    folder: str


def _rank_main(rank: int, world: World, body: Callable[..., None], args: tuple[object, ...]) -> None:
    assert PRELOADED in sys.modules, "the forkserver could not import it, and says nothing"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # So that a tiny model has several buckets.
    bucket_plan.LEAST, bucket_plan.LEAST_OF_A_RANK = 200, 1
    gather_plan.LEAST = 2000
    # DeepSpeed reads these; its own communication extension would cost a minute of compilation.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world.size), MASTER_ADDR="127.0.0.1")
    if world.backend == "hccl" and world.sets_device:
        torch.npu.set_device(rank)
    dist.init_process_group(
        world.backend,
        init_method=f"file://{world.folder}/store",
        rank=rank,
        world_size=world.size,
        timeout=timedelta(seconds=60),
    )
    try:
        body(*args)
        if not world.sets_device:
            assert npus_in_use() == [rank]
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_on_ranks(
    world_size: int,
    body: Callable[..., None],
    *args: object,
    deadline_s: float = DEADLINE_S,
    backend: str = "gloo",
    sets_device: bool = True,
) -> None:
    """Call ``body(*args)`` on each of ``world_size`` ranks; raise what the first failing rank raised.

    With ``backend="hccl"`` each rank has an NPU of its own; unless it ``sets_device``, as scripts for DeepSpeed need
    not, ``body`` builds an engine, and must have used no other NPU at its end. Past ``deadline_s`` every rank is
    killed and TimeoutError raised: a hang is a failure with a name.
    """
    _start_forkserver()
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _rank_main,
            (World(world_size, backend, sets_device, folder), body, args),
            world_size,
            join=False,
            start_method="forkserver",
        )
        deadline = time.monotonic() + deadline_s
        try:
            while not context.join(timeout=max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{body.__name__} on {world_size} ranks did not end within {deadline_s} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()


def npus_in_use() -> list[int]:
    """The NPUs on which this process has a stream, and so everything else; asking opens none."""
    import torch_npu

    return [index for index in range(torch.npu.device_count()) if torch_npu._C._npu_hasPrimaryContext(index)]


def shared_memory_files() -> set[str]:
    """What lies in /dev/shm now: nothing of ours may stay there."""
    return {path.name for path in Path("/dev/shm").iterdir()}
