"""One rank of the acceptance: a process that runs the cases it is told to and reports each into a file."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ds_npu.accelerator.environment import apply_defaults, bound_to_cores
from ds_npu.acceptance.case import Case, Check, Measured, NotRunError, Scope
from ds_npu.acceptance.machine import simulated

C = TypeVar("C", bound=Case)

MESSAGE_CHARACTERS = 1500
READY = "ready"
"""The case in a rank's first report, which says that it has its NPU and has met the other ranks."""
GROUP_TIMEOUT_S = 300
DIGITS = 9
"""Significant digits of the numbers in a report."""
TIMED_CALLS = 5


@dataclass(frozen=True)
class Assignment:
    """Work of the ranks of one world, passed as JSON on their command line."""

    names: tuple[str, ...]
    ranks: int
    scope: Scope
    """The scope of the whole run."""
    folder: str
    """Folder of files that cases leave to later ones of the run."""
    world: str
    """Folder of this world: the rendezvous of its ranks, their reports, their output."""

    @staticmethod
    def parsed(text: str) -> Assignment:
        found = json.loads(text)
        return Assignment(**found | {"names": tuple(found["names"]), "scope": Scope(*found["scope"])})

    def text(self) -> str:
        """The inverse of ``parsed``."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Report:
    """A rank's report of a case; see ``Measured``. ``raised`` is the error that ended it."""

    case: str
    check: Check | None = None
    wrong: str = ""
    call_s: float | None = None
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)
    raised: str = ""
    not_run: str = ""

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @staticmethod
    def parsed(line: bytes) -> Report:
        """The inverse of ``line``."""
        found = json.loads(line)
        return Report(**found | {"check": found["check"] and Check(**found["check"])})


def reports_of(world: str, rank: int) -> Path:
    """The file of a rank's reports: lines of JSON, the first once it is READY, then one for each case."""
    return Path(world, f"reports-{rank}")


def npu_module() -> Any:
    """``torch.npu``, which type checkers do not know."""
    return torch.get_device_module("npu")


def run_cases(
    cases: Callable[[Scope], Sequence[C]], run: Callable[[C, Assignment], Measured], distributed: bool
) -> int:
    """The main function of a rank: run the cases that the command line names, in order; returns the exit code.

    A case that raises ends the process: its remains on the device would spoil the next one.
    """
    job = Assignment.parsed(sys.argv[1])
    rank = int(os.environ["RANK"])
    # SIGUSR1 writes the stack of every thread into the log.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    apply_defaults(os.environ, bound_to_cores())
    known = {case.name: case for case in cases(job.scope)}
    npu_module().set_device(rank)
    if distributed:
        dist.init_process_group(
            "hccl",
            init_method=f"file://{job.world}/store",
            rank=rank,
            world_size=job.ranks,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )
    with reports_of(job.world, rank).open("w", buffering=1) as reports:
        reports.write(Report(READY).line())
        for name in job.names:
            report = _report(known[name], run, job)
            reports.write(report.line())
            if report.raised:
                return 1
    if distributed:
        dist.barrier()
        dist.destroy_process_group()
    return 0


def _report(case: C, run: Callable[[C, Assignment], Measured], job: Assignment) -> Report:
    try:
        found = run(case, job)
        npu_module().synchronize()
    except NotRunError as reason:
        return Report(case.name, not_run=str(reason))
    except Exception as error:
        traceback.print_exc()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}: {error}"
        return Report(case.name, raised=message[:MESSAGE_CHARACTERS])
    series = {name: [float(f"{x:.{DIGITS}g}") for x in values] for name, values in found.series.items()}
    return Report(case.name, worst(found.checks), found.wrong[:MESSAGE_CHARACTERS], found.call_s, series)


def worst(checks: Iterable[Check]) -> Check | None:
    """The check that is nearest to failing, or fails."""
    return max(checks, key=lambda check: check.share, default=None)


def _end_with_parent(parent: int) -> None:
    """End this process once its parent has ended: it would go on holding its NPU."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def timed(call: Callable[[], object]) -> float | None:
    """Seconds of ``call`` on the device: the median of TIMED_CALLS after one that is not counted.

    None on simulated NPUs: their times say nothing.
    """
    if simulated():
        return None
    npu = npu_module()
    call()
    seconds = []
    for _ in range(TIMED_CALLS):
        npu.synchronize()
        begun = time.perf_counter()
        call()
        npu.synchronize()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)
