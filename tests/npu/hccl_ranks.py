"""Ranks that are expected to fail: how each of them ended, where ranks.run_on_ranks would raise."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ranks  # noqa: F401  its forkserver has imported torch
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DEADLINE_S = 60.0
NO_WATCHDOG = {"TORCH_HCCL_ASYNC_ERROR_HANDLING": "0"}
"""torch_npu's watchdog ends a process whose communicator has failed; without it the error is seen where one waits."""


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code, the error it raised ("" for none), and the seconds it waited for that."""

    code: int
    said: str
    waited_s: float


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    body: Callable[..., None],
    args: tuple[object, ...],
    environ: Mapping[str, str],
) -> None:
    os.environ.update(environ, RANK=str(rank))
    torch.set_num_threads(1)
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    dist.all_reduce(torch.ones(1, device="npu"))  # call 1: the communicator is there
    torch.npu.synchronize()
    begun = time.monotonic()
    try:
        body(*args)
        torch.npu.synchronize()
    except RuntimeError as error:
        said = str(error).replace("\n", " ")
        Path(folder, str(rank)).write_text(f"{time.monotonic() - begun} {said}")
        # Now as a program does that did not catch it: the interpreter ends with all it holds.
        sys.exit(3)


def endings(world_size: int, body: Callable[..., None], *args: object, **environ: str) -> list[Ended]:
    """Call ``body(*args)`` on ``world_size`` ranks with NPUs; all must end within DEADLINE_S, however they do."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {**NO_WATCHDOG, **environ}
        context = mp.start_processes(
            _rank_main, (world_size, folder, body, args, variables), world_size, join=False, start_method="forkserver"
        )
        deadline = time.monotonic() + DEADLINE_S
        try:
            for process in context.processes:
                process.join(max(0.0, deadline - time.monotonic()))
                assert not process.is_alive(), f"a rank of {body.__name__} did not end within {DEADLINE_S} s"
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        ended = []
        for rank, process in enumerate(context.processes):
            path = Path(folder, str(rank))
            waited, _, said = path.read_text().partition(" ") if path.exists() else ("0", "", "")
            ended.append(Ended(process.exitcode, said, float(waited)))
        return ended
