"""Starts and watches the ranks of a world; each case gets a result, also where a rank crashes or hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Literal

from ds_npu.acceptance.case import Case, Check, Group, Scope
from ds_npu.acceptance.rank import Assignment, Report, reports_of, worst

Outcome = Literal["passed", "failed", "crashed", "timed out", "not run"]

START_S = 300.0
"""Seconds in which ranks import what they need and meet."""
GRACE_S = 3.0
"""Seconds for the other ranks to report, and to write their stacks, once one has failed."""
KILLED_S = 30.0
"""Seconds within which a killed rank ends."""
POLL_S = 0.05
NO_ANSWER = "no answer"
LAST_LINES = 25
"""Lines of a rank's output that are kept with a case that did not end."""


@dataclass(frozen=True)
class CaseResult:
    """The result of a case."""

    group: str
    case: str
    ranks: int
    outcome: Outcome
    seconds: float = 0.0
    check: Check | None = None
    """The check of all ranks that is nearest to failing, or fails."""
    call_s: float | None = None
    message: str = ""
    output: str = ""
    """The last lines that ranks printed, where the case did not end."""
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)


class World:
    """The processes of one world of ranks; leaving the context kills those that are left."""

    def __init__(self, module: str, job: Assignment) -> None:
        self.job = job
        self.seen = [0] * job.ranks
        """Bytes of each rank's reports that were read so far."""
        Path(job.world).mkdir()
        self.processes = [self._start(module, rank) for rank in range(job.ranks)]

    def _start(self, module: str, rank: int) -> subprocess.Popen[bytes]:
        environ = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.job.ranks),
            "LOCAL_WORLD_SIZE": str(self.job.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "DS_ACCELERATOR": "npu",
        }
        with self._log(rank).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, self.job.text()],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            # The process group has a rank's own children, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # A process that waits in the driver does not end; the run goes on without it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_S)

    def _log(self, rank: int) -> Path:
        return Path(self.job.world, f"log-{rank}")

    def reports(self, limit_s: float) -> tuple[list[Report], str]:
        """The next report of each rank, in order, and why some are missing ("" if none is).

        It waits until every rank has reported, until GRACE_S after one has raised or ended, or for ``limit_s``.
        """
        found: dict[int, Report] = {}
        limit = time.monotonic() + limit_s
        broken = False
        gone = ""
        while len(found) < self.job.ranks and time.monotonic() <= limit:
            ended = {rank: process.poll() for rank, process in enumerate(self.processes)}
            for rank in range(self.job.ranks):
                if rank not in found and (report := self._next(rank)):
                    found[rank] = report
            missing = {rank: code for rank, code in ended.items() if code is not None and rank not in found}
            gone = "; ".join(f"rank {rank} {_ending(code)}" for rank, code in missing.items())
            if not broken and (gone or any(report.raised for report in found.values())):
                broken = True
                limit = min(limit, time.monotonic() + GRACE_S)
            time.sleep(0 if len(found) == self.job.ranks else POLL_S)
        raised = [f"rank {rank}: {found[rank].raised}" for rank in sorted(found) if found[rank].raised]
        # A rank that ended without a report is the cause of the others' errors.
        why = "; ".join(filter(None, [gone, *raised[:1]]))
        if not why and len(found) < self.job.ranks:
            why = f"{NO_ANSWER} within {limit_s:g} s"
        return [found[rank] for rank in sorted(found)], why

    def _next(self, rank: int) -> Report | None:
        """The next whole line of a rank's reports."""
        file = reports_of(self.job.world, rank)
        if not file.exists():
            return None
        with file.open("rb") as reports:
            reports.seek(self.seen[rank])
            line = reports.readline()
        if not line.endswith(b"\n"):
            return None
        self.seen[rank] += len(line)
        return Report.parsed(line)

    def ask_where_they_stand(self) -> None:
        """Have every rank that still runs write its threads' stacks into its log."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)
        time.sleep(GRACE_S)

    def output(self) -> str:
        """The last lines that each rank printed."""
        texts = []
        for rank in range(self.job.ranks):
            texts += [f"-- rank {rank}", *self._log(rank).read_text(errors="replace").splitlines()[-LAST_LINES:]]
        return "\n".join(texts)


def _ending(code: int) -> str:
    return f"ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"


def run_group(group: Group, cases: Sequence[Case], scope: Scope, folder: Path, until: float) -> Iterator[CaseResult]:
    """Run ``cases`` in few worlds: a new one for another number of ranks, a case ``alone``, and after a crash.

    After ``until`` (of ``time.monotonic``) no case is begun.
    """
    batches: list[list[Case]] = []
    for (_, alone), some in groupby(cases, lambda case: (case.ranks, case.alone)):
        alike = list(some)
        batches += [[case] for case in alike] if alone else [alike]
    for left in batches:
        while left:
            if time.monotonic() > until:
                for case in left:
                    yield CaseResult(group.name, case.name, case.ranks, "not run", message=TIME_OVER)
                break
            job = Assignment(
                tuple(case.name for case in left),
                left[0].ranks,
                scope,
                str(folder),
                str(folder / f"world-{len(list(folder.glob('world-*')))}"),
            )
            for result in _in_one_world(group, left, job, until):
                left = left[1:]
                yield result


TIME_OVER = "the time was over: the same command with --resume runs it"


def _in_one_world(group: Group, cases: Sequence[Case], job: Assignment, until: float) -> Iterator[CaseResult]:
    """Run ``cases`` in one world, up to the one that breaks it."""
    with World(group.module, job) as world:
        reports, why = world.reports(START_S)
        if why:
            world.ask_where_they_stand()
            message = f"its ranks did not start: {why}"
            for case in cases:
                output = world.output() if case is cases[0] else ""
                yield CaseResult(group.name, case.name, case.ranks, "crashed", message=message, output=output)
            return
        for case in cases:
            if time.monotonic() > until:
                return
            begun = time.monotonic()
            reports, why = world.reports(case.timeout_s)
            result = _broken(group, case, world, why) if why else _ended(group, case, reports)
            yield replace(result, seconds=time.monotonic() - begun)
            if why:
                return


def _broken(group: Group, case: Case, world: World, why: str) -> CaseResult:
    outcome: Outcome = "timed out" if why.startswith(NO_ANSWER) else "crashed"
    if outcome == "timed out":
        world.ask_where_they_stand()
    return CaseResult(group.name, case.name, case.ranks, outcome, message=why, output=world.output())


def _ended(group: Group, case: Case, reports: Sequence[Report]) -> CaseResult:
    """The result of a case of which all ranks have reported: the worst of their checks decides."""
    if skipped := next((report.not_run for report in reports if report.not_run), ""):
        return CaseResult(group.name, case.name, case.ranks, "not run", message=skipped)
    check = worst(filter(None, (report.check for report in reports)))
    wrong = next((report.wrong for report in reports if report.wrong), "")
    if not wrong and check is not None and not check.passed:
        wrong = f"{check.what}: {check.error:.3g}, and {check.allowed:.3g} is allowed"
    outcome: Outcome = "failed" if wrong else "passed"
    first = reports[0]
    return CaseResult(
        group.name, case.name, case.ranks, outcome, check=check, call_s=first.call_s, message=wrong, series=first.series
    )
