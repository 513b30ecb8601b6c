"""``ds_npu calibrate``: a machine's profile from the speeds that ``ds_npu accept`` measured on it."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_npu.acceptance.case import Scope
from ds_npu.acceptance.speed_cases import SERIES, SpeedCase, calibrated, speed_cases
from ds_npu.cli.command import Command, refused
from ds_npu.config.problems import printable, shown
from ds_npu.topology.machine import LIKE, MACHINES, TABLES, UNITS, machine_of

GROUP = "speeds"
NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("report", type=Path, metavar="REPORT", help="the file that ds_npu accept wrote")
    parser.add_argument("--like", choices=MACHINES, help="whose numbers to take where none was measured (by the chip)")
    parser.add_argument("--name", default="measured", metavar="NAME", help="the machine's name (measured)")
    parser.add_argument(
        "--out", type=Path, default=Path("machine.json"), metavar="FILE", help="the profile to write (machine.json)"
    )


def _run(arguments: Namespace) -> int:
    if arguments.out.exists():
        return refused("calibrate", f"{arguments.out} is there already: --out names another file")
    if not NAME.fullmatch(arguments.name) or arguments.name in MACHINES:
        return refused("calibrate", f"--name {shown(arguments.name)}: up to 40 letters and digits, of no known machine")
    try:
        report = json.loads(arguments.report.read_text())
        profile = profile_of(report, arguments.name, arguments.like)
        arguments.out.write_text(json.dumps({"machines": profile}, indent=2) + "\n")
    except (OSError, ValueError) as error:
        return refused("calibrate", f"{printable(str(arguments.report))}: {error}", 1)
    except (LookupError, TypeError, AttributeError, RecursionError):
        return refused("calibrate", f"{printable(str(arguments.report))}: it is no whole file of ds_npu accept", 1)
    entries = profile[arguments.name]
    for field in UNITS:
        if field in entries:
            print(f"  {field:<16} {_shown(entries[field]['value'])} {UNITS[field]}")
    print(
        f"{printable(str(arguments.out))}: {len(entries) - 1} numbers measured, {len(UNITS) - len(entries) + 1} as of "
        f"{entries[LIKE]}. Use it: ds_npu check --machine {printable(str(arguments.out))}"
    )
    return 0


def profile_of(report: Any, name: str, like: str | None) -> dict[str, Any]:
    """``{name: entries}`` of a profile, like the chip's but for what ``report`` has measured.

    Raises ValueError for what is no report of ``ds_npu accept`` on real NPUs with measured speeds.
    """
    if not isinstance(report, dict) or not isinstance(report.get("cases"), list) or "ds_npu accept" not in report:
        raise ValueError("it is no file of ds_npu accept")
    if report.get("simulated"):
        raise ValueError(
            "its NPUs were simulated, whose times say nothing; run ds_npu accept --only speeds on real ones"
        )
    npus = report.get("npus") or [{}]
    base = MACHINES[like] if like else machine_of(str(npus[0].get("name")))
    measured = list(_measured(report["cases"], Scope(len(npus), False)))
    if not measured:
        raise ValueError("it has no speeds; run ds_npu accept --only speeds, without --cases small")
    machine = calibrated(base, measured)
    versions = report.get("versions", {})
    source = (
        f"ds_npu accept on {len(npus)} x {npus[0].get('name')}, {report.get('begun')}: torch_npu "
        f"{versions.get('torch_npu')}, CANN {versions.get('cann')}, driver {versions.get('driver')}"
    )
    entries: dict[str, Any] = {LIKE: base.name}
    for field in dict.fromkeys(case.field for case, _ in measured):
        value = getattr(machine, field)
        entries[field] = {
            "value": {str(size): rate for size, rate in value} if field in TABLES else value,
            "unit": UNITS[field],
            "mark": "measured",
            "trust": "high",
            "source": source,
        }
    return {name: entries}


def _measured(entries: list[Any], scope: Scope) -> Iterator[tuple[SpeedCase, float]]:
    """The cases that have a number, with it; a case comes after those whose numbers it is calibrated with."""
    numbers = {entry["case"]: entry.get(SERIES) for entry in entries if entry.get("group") == GROUP}
    for case in speed_cases(scope):
        found = numbers.get(case.name)
        if found:
            yield case, float(found[0])


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{rate:.4g} at {int(size):,}" for size, rate in value.items())
    return f"{value:.6g}"


COMMAND = Command("calibrate", "make a machine's profile of what ds_npu accept measured on it", _add_arguments, _run)
