"""Measures the speeds of a machine's profile: on one NPU, and between the NPUs of this machine."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch

from ds_npu.acceptance.case import Measured
from ds_npu.acceptance.machine import simulated
from ds_npu.acceptance.rank import TIMED_CALLS, Assignment, npu_module, run_cases, timed
from ds_npu.acceptance.speed_cases import SERIES, SpeedCase, speed_cases
from ds_npu.comm.collectives import all_gather, all_reduce
from ds_npu.ops.attention import attention

REPEATED = 20
"""Calls between two events."""
AHEAD = 4096
"""Rows of the product that runs on the device while the host puts the timed calls on its stream."""


def measure(case: SpeedCase, job: Assignment) -> Measured:
    """Run the calls of ``case``; without a number on simulated NPUs, whose times say nothing."""
    number: float | None
    if case.kind == "hbm":
        _, total = npu_module().mem_get_info()
        number = None if simulated() else float(total)
    else:
        call = _call(case)
        number = timed(call) if case.kind == "host" else device_seconds(call)
    return Measured(series={} if number is None else {SERIES: [number]})


def _call(case: SpeedCase) -> Callable[[], object]:
    """The call that ``case`` times; its inputs are allocated once, before it."""
    size = case.size
    if case.kind in ("bfloat16", "float32"):
        a, b = (torch.randn(size, size, device="npu").to(getattr(torch, case.kind)) for _ in range(2))
        return lambda: a @ b
    if case.kind == "memory":
        # Half of the bytes are read, half are written.
        x, y = (torch.zeros(size // 4, dtype=torch.bfloat16, device="npu") for _ in range(2))
        return lambda: torch.exp(x, out=y)
    if case.kind == "attention":
        q, k, v = (torch.randn(case.shape, dtype=torch.bfloat16, device="npu").requires_grad_() for _ in range(3))
        given = torch.ones(case.shape, dtype=torch.bfloat16, device="npu")

        def call() -> object:
            out, _ = attention(q, k, v)
            return torch.autograd.grad(out, (q, k, v), given)

        return call
    if case.kind == "host":
        source = torch.zeros(size, dtype=torch.uint8).pin_memory()
        target = torch.empty(size, dtype=torch.uint8, device="npu")
        return lambda: target.copy_(source, non_blocking=True)
    x = torch.zeros(max(1, size // case.ranks // 2), dtype=torch.bfloat16, device="npu")
    if case.kind == "all_gather":
        return lambda: all_gather(x, 0, None).wait()
    if case.kind == "all_reduce":
        return lambda: all_reduce(x, None).wait()
    return lambda: x.add_(1)


def device_seconds(call: Callable[[], object]) -> float | None:
    """Seconds of ``call`` on the device, by events: the median of several series, before each of which a product keeps
    the device busy until the host is ahead. None on simulated NPUs."""
    npu = npu_module()
    call()
    npu.synchronize()
    if simulated():
        return None
    busy = torch.randn(AHEAD, AHEAD, device="npu")
    seconds: list[float] = []
    for _ in range(TIMED_CALLS):
        begun, ended = (npu.Event(enable_timing=True) for _ in range(2))
        for _ in range(REPEATED):
            busy @ busy
        begun.record()
        for _ in range(REPEATED):
            call()
        ended.record()
        npu.synchronize()
        seconds.append(begun.elapsed_time(ended) / 1e3 / REPEATED)
    return statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(run_cases(speed_cases, measure, distributed=True))
