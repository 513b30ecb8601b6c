"""The run of ``ds_npu accept``: every group, a line for each case, the file, the summary."""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from ds_npu.acceptance.case import GROUP_NAMES, Case, Group, Scope
from ds_npu.acceptance.groups import GROUPS
from ds_npu.acceptance.machine import Npus, simulated
from ds_npu.acceptance.record import Record, entry_of, first_line, is_clean, verdict
from ds_npu.acceptance.world import CaseResult, run_group
from ds_npu.cli.command import refused
from ds_npu.config.problems import printable

LAST_BEGIN_S = 48 * 60.0
"""Seconds after which no case begins, so that a run takes an hour at most: ranks have START_S, a case 420 s."""
NAME_COLUMNS = 78


def run_acceptance(arguments: Namespace, npus: Npus) -> int:
    """Run on ``npus`` what the command line asks for; returns the exit code: 0 where all passed, 2 for a wrong file."""
    begun = time.monotonic()
    scope = Scope(len(npus.names), arguments.cases == "small" or (arguments.cases is None and simulated()))
    record = Record.begun(arguments.out, npus, scope.small)
    try:
        record = record.continued() if arguments.resume else record
        record.write(["nothing was run yet"])
    except (OSError, ValueError) as error:
        return refused("accept", str(error))
    chosen = [group for group in GROUPS if group.name in (arguments.only or GROUP_NAMES)]
    left = {group: _left(group, scope, record) for group in chosen}
    total = sum(map(len, left.values()))
    print(
        f"ds_npu accept: {npus.summary}{', SIMULATED by ds_npu sim: this says nothing about a real NPU' * simulated()}"
    )
    print(_versions(record))
    print(f"{total} cases, an hour at most; results go into {printable(str(arguments.out))}")
    number = 0
    with tempfile.TemporaryDirectory(prefix="ds_npu-accept-") as folder:
        for group, cases in left.items():
            print(f"\n{group.name}: {group.purpose}", flush=True)
            for result in _results(group, cases, scope, Path(folder), begun + LAST_BEGIN_S):
                number += 1
                record.add(result)
                print(f"[{number:>{len(str(total))}}/{total}] {_line(result)}", flush=True)
    entries = list(record.entries.values())
    summary = verdict(entries, printable(str(arguments.out)), simulated(), time.monotonic() - begun)
    record.write(summary)
    print("\n" + "\n".join(summary))
    return 0 if is_clean(entries) else 1


def _left(group: Group, scope: Scope, record: Record) -> list[Case]:
    return [case for case in group.cases(scope) or [Case("all of it")] if not record.passed(group.name, case.name)]


def _results(group: Group, left: list[Case], scope: Scope, folder: Path, until: float) -> Iterator[CaseResult]:
    why_not = group.unmet() or ("" if group.cases(scope) else "it needs two NPUs or more")
    for case in left if why_not else ():
        yield CaseResult(group.name, case.name, case.ranks, "not run", message=why_not)
    if not why_not:
        yield from run_group(group, left, scope, folder, until)


def _line(result: CaseResult) -> str:
    outcome = result.outcome if result.outcome in ("passed", "not run") else result.outcome.upper()
    line = f"{outcome:<9} {result.case:<{NAME_COLUMNS}}"
    if result.check is not None:
        line += f" error {result.check.error:8.2g} of {result.check.allowed:8.2g}"
    line += f" {result.seconds:6.1f} s"
    if result.call_s is not None:
        line += f" {1e6 * result.call_s:10,.0f} us a call"
    message = entry_of(result).get("said")
    return f"{line}\n    {first_line(message)}" if message else line


def _versions(record: Record) -> str:
    versions = record.about["versions"]
    assert isinstance(versions, dict)
    named = ("ds_npu", "torch", "torch_npu", "cann", "driver", "deepspeed", "transformers")
    return ", ".join(f"{name} {versions[name] or 'unknown'}" for name in named)
