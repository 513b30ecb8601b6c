"""The report of a profiled window: where the time of a step goes, on the ranks that were profiled together."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ds_npu.log import aligned
from ds_npu.step_time.intervals import BUBBLE, EXPOSED, HOST, NANO, WAITS, by_axes, mean_shares
from ds_npu.step_time.lanes import COLUMNS, RankLanes, lanes_svg
from ds_npu.step_time.rank_times import (
    OperatorTime,
    RankTimes,
    call_axes,
    durations_of,
    rank_times,
    shortest,
    times_as_json,
)
from ds_npu.step_time.tables import activity_rows, communication_answers, flush_right
from ds_npu.step_time.trace import RankTrace
from ds_npu.topology.degrees import DENSE, NAMES
from ds_npu.topology.machine import machine_named

SLOWEST = 10
"""Rows of the table of operators."""
SHOWN_RANKS = 8
"""Most ranks with a column or a lane of their own; of more ranks the first ones."""


class SlowestRank(NamedTuple):
    """The rank that others wait for in the calls of one name on one communicator."""

    name: str
    ranks: tuple[int, ...]
    axes: str
    calls: int
    slowest: int
    """The global rank for which the calls took the least time: it came last."""
    last: int
    """In how many of the calls it came last."""
    by_seconds: float
    """Seconds of a step that the other ranks waited for it, on average."""


class StepReport(NamedTuple):
    """A window of steps on some ranks."""

    ranks: tuple[RankTimes, ...]

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, the mean of steps and ranks."""
        return sum(each.seconds / each.header.count for each in self.ranks) / len(self.ranks)

    def step_activities(self) -> list[dict[str, float]]:
        """The seconds of each rank's activities in a step."""
        return [{name: seconds / each.header.count for name, seconds in each.activities.items()} for each in self.ranks]

    def shares(self) -> dict[str, float]:
        """Parts of a step by activity, the mean of the ranks, the largest first."""
        return mean_shares(self.step_activities(), self.step_seconds)


def step_report(traces: Sequence[RankTrace]) -> StepReport:
    """The report of ``traces``, of one run and window."""
    least = shortest(map(durations_of, traces))
    return StepReport(tuple(rank_times(each, least) for each in traces))


def operator_times(report: StepReport) -> list[OperatorTime]:
    """The operators of all ranks, the longest first."""
    found: dict[tuple[str, str], list[OperatorTime]] = defaultdict(list)
    for each in report.ranks:
        for operator in each.operators:
            found[operator.name, operator.kind].append(operator)
    sums = [
        OperatorTime(name, kind, *(sum(column) for column in zip(*(each[2:] for each in own), strict=True)))
        for (name, kind), own in found.items()
    ]
    return sorted(sums, key=lambda each: -each.seconds)


def slowest_ranks(report: StepReport) -> list[SlowestRank]:
    """The slowest rank of each communicator's collectives and of a ring's messages, those that cost most first.

    A call ends on all ranks together: the one for which it is shortest came last, and the others waited for it.
    """
    durations: dict[Any, dict[int, int]] = defaultdict(dict)
    for each in report.ranks:
        for key, time in each.durations.items():
            durations[key][each.header.rank] = time
    groups: dict[tuple[tuple[int, ...], str], list[dict[int, int]]] = defaultdict(list)
    for key, times in durations.items():
        if len(times) > 1:
            groups[key.ranks, key.name].append(times)
    degrees = report.ranks[0].header.degrees
    count = report.ranks[0].header.count
    found = [
        SlowestRank(name, ranks, call_axes(name, ranks, degrees), len(calls), *_slowest(calls, count))
        for (ranks, name), calls in groups.items()
        # Stages wait for each other's messages by their schedule.
        if name != "messages"
    ]
    return sorted(found, key=lambda each: -each.by_seconds)


def _slowest(calls: Sequence[Mapping[int, int]], count: int) -> tuple[int, int, float]:
    """The rank with the least time in ``calls``, how often it came last, and the seconds of a step that others wait."""
    sums: Counter[int] = Counter()
    for times in calls:
        sums.update(times)
    rank = min(sums, key=lambda each: sums[each])
    last = sum(rank in times and times[rank] == min(times.values()) for times in calls)
    others = [time for other, time in sums.items() if other != rank]
    return rank, last, NANO * (sum(others) / len(others) - sums[rank]) / count


def report_text(report: StepReport) -> Iterator[str]:
    """The answer in a few lines, then tables: activities, operators, collectives."""
    yield _headline(report)
    yield from (f"  {note}" for each in report.ranks for note in each.header.notes)
    yield ""
    yield from aligned([("  " + name, value) for name, value in _answers(report)])
    yield ""
    yield "A step, ms"
    ranks = [
        (f"rank {each.header.rank}", own) for each, own in zip(report.ranks, report.step_activities(), strict=True)
    ]
    yield from flush_right(list(activity_rows(ranks[:SHOWN_RANKS], report.shares())))
    yield ""
    yield from _operator_table(report)
    if slowest := slowest_ranks(report):
        yield ""
        yield from _slowest_table(slowest)


def _headline(report: StepReport) -> str:
    header = report.ranks[0].header
    degrees = header.degrees
    axes = " x ".join(f"{NAMES[axis]} {degrees.size(axis)}" for axis in DENSE if degrees.size(axis) > 1) or "one rank"
    first, last = header.steps
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    ranks = ", ".join(str(each.header.rank) for each in report.ranks[:SHOWN_RANKS])
    more = f" and {len(report.ranks) - SHOWN_RANKS} more" if len(report.ranks) > SHOWN_RANKS else ""
    time = f"{1e3 * report.step_seconds:,.1f} ms a step"
    return f"Profile of {steps}, {axes}, on {header.device}: {time} (ranks {ranks}{more})"


def _answers(report: StepReport) -> Iterator[tuple[str, str]]:
    shares = report.shares()
    yield from communication_answers(shares)
    yield "host-bound", f"{shares.get(HOST, 0.0):.1%}: nothing runs, the device waits for Python or for the script"
    header = report.ranks[0].header
    if header.degrees.pp > 1:
        planned = ""
        if header.schedule is not None:
            name, micro_batches, idle = header.schedule
            planned = f"; {name} over {header.degrees.pp} ranks with {micro_batches} micro-batches has {idle:.1%}"
        yield "bubble", f"{shares.get(BUBBLE, 0.0):.1%} of the step{planned}"


def _operator_table(report: StepReport) -> Iterator[str]:
    operators = operator_times(report)
    machine = report.ranks[0].header.machine
    yield f"Slowest operators of a step, all these ranks; what they reach of {machine}"
    rows = [("", "calls", "ms", "reached")]
    count = report.ranks[0].header.count
    for each in operators[:SLOWEST]:
        reached = f"{each.least_seconds / each.known_seconds:.3%}" if each.known_seconds else "-"
        rows.append((each.name, f"{each.calls / count:,.0f}", f"{1e3 * each.seconds / count:,.2f}", reached))
    yield from flush_right(rows)


def _slowest_table(slowest: Sequence[SlowestRank]) -> Iterator[str]:
    yield "Slowest rank of each collective: how often it came last, and how long the others waited for it in a step, ms"
    rows = [("", "ranks", "calls", "slowest", "last in", "ms")]
    for each in slowest[:SLOWEST]:
        named = ", ".join(map(str, each.ranks)) if len(each.ranks) <= SHOWN_RANKS else f"{len(each.ranks)} ranks"
        row = (f"{each.name} ({each.axes})", named, f"{each.calls:,}", f"rank {each.slowest}")
        rows.append((*row, f"{each.last / each.calls:.0%}", f"{1e3 * each.by_seconds:,.2f}"))
    yield from flush_right(rows)


def report_svg(report: StepReport) -> str:
    """A picture: of each rank a lane of its activities in the window, and one of its communication."""
    lanes = [RankLanes(each.header.rank, each.columns, each.message_columns) for each in report.ranks[:SHOWN_RANKS]]
    return lanes_svg(_headline(report), lanes, COLUMNS, report.shares())


def report_json(report: StepReport) -> dict[str, Any]:
    """All figures; times in seconds, shares of a step."""
    header, shares = report.ranks[0].header, report.shares()
    machine = machine_named(header.machine)
    return {
        "ds_npu profile report": 1,
        "steps": list(header.steps),
        "machine": header.machine,
        "peak": {"value": machine.peak, "evidence": dict(machine.evidence)["peak"]},
        "step_seconds": report.step_seconds,
        "shares": shares,
        "exposed_communication": sum(by_axes(shares, EXPOSED).values()),
        "waits_for_ranks": sum(by_axes(shares, WAITS).values()),
        "host_bound": shares.get(HOST, 0.0),
        "bubble": shares.get(BUBBLE, 0.0),
        "schedule": None if header.schedule is None else header.schedule._asdict(),
        "operators": [each._asdict() for each in operator_times(report)],
        "slowest_ranks": [each._asdict() for each in slowest_ranks(report)],
        "ranks": [times_as_json(each) for each in report.ranks],
    }


def write_report(report: StepReport, folder: Path) -> None:
    """Write the report as ``report.txt``, ``report.json`` and ``report.svg``; raises OSError where it cannot."""
    contents = {
        "report.txt": "\n".join(report_text(report)) + "\n",
        "report.json": json.dumps(report_json(report), indent=1) + "\n",
        "report.svg": report_svg(report),
    }
    for name, content in contents.items():
        incomplete = folder / f".{name}.incomplete"
        incomplete.write_text(content, encoding="utf-8")
        incomplete.replace(folder / name)
