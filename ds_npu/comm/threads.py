"""Ranks that are threads of this process: collectives over them need no communicator, no device and no other process.

They compute, on one rank and with small tensors on the host, what several ranks will compute together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ds_npu.comm.pending import Works

T = TypeVar("T")
Read = Callable[[list[torch.Tensor]], torch.Tensor]

TIMEOUT_SECONDS = 120
"""How long a rank waits for the others at a collective."""


class ThreadGroup(dist.ProcessGroup):
    """One thread's view of a group of threads: all-reduce, all-gather and reduce-scatter of sums, all of them blocking.

    Arguments are those of ``torch.distributed.ProcessGroup``, whose methods torch calls by these names.
    """

    def __init__(self, rank: int, barrier: threading.Barrier, given: list[torch.Tensor]) -> None:
        super().__init__(rank, len(given))  # type: ignore[call-arg]
        self._rank, self._barrier, self._given = rank, barrier, given

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:  # type: ignore[override]
        return self._write(tensors[0], tensors[0], lambda given: torch.stack(given).sum(0))

    def all_gather_single(self, out: torch.Tensor, mine: torch.Tensor, options: Any = None) -> Any:
        return self._write(out, mine, lambda given: torch.cat([each.flatten() for each in given]))

    def reduce_scatter_single(self, out: torch.Tensor, mine: torch.Tensor, options: Any = None) -> Any:
        start = self._rank * out.numel()
        zero = out.new_zeros(())
        return self._write(
            out, mine, lambda given: sum((each.flatten().narrow(0, start, out.numel()) for each in given), zero)
        )

    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    """torch 2.12 calls the two methods by these names."""

    def _write(self, out: torch.Tensor, mine: torch.Tensor, read: Read) -> Works:
        """Write ``read`` of every rank's ``mine`` into ``out``."""
        with torch.no_grad():
            self._given[self._rank] = mine
            self._barrier.wait(TIMEOUT_SECONDS)
            result = read(self._given)
            # Nobody overwrites a tensor that another thread still reads.
            self._barrier.wait(TIMEOUT_SECONDS)
            out.copy_(result.view_as(out))
        return Works()


def run_in_threads(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """Run ``work`` on each of ``size`` ranks; returns their results in order, raises what the first to fail raised.

    A new thread has torch's default settings: gradients on, no autocast, no default device.
    """
    barrier = threading.Barrier(size)
    given = [torch.empty(0)] * size
    results: dict[int, T] = {}
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(rank, barrier, given))
        except Exception as error:  # It is raised below, by the thread that asked.
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        raise error
    return [results[rank] for rank in range(size)]
