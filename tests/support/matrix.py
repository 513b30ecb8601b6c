"""Which slow tests a run takes: a sample drawn by the commit's hash that fits a budget of seconds, or all of them.

``tests/durations.json`` has the seconds of every test that takes SLOW or more, measured on a quiet machine of 2 cores.
A test is slow if it is in there or marked so; all others always run. A parametrized test offers its first
``corners`` cases and ``drawn`` of the others (``@pytest.mark.matrix(corners=3, drawn=2)``; without the mark one and
one). In an order drawn by the hash a run takes a case of each test, then further cases, as far as they fit the budget.

``SEED=1a2b3c4 make test`` draws the sample of another run again, ``BUDGET=900`` takes more of it. ``make exhaustive``
leaves nothing out, and writes the durations; nor does naming a single case. Tests with ``corners=0, drawn=0`` need
environments of their own (``make clients-env``): no other run takes them, and each run says so.
"""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")
CORNERS, DRAWN = 1, 1
SLOW = 0.2
"""Seconds."""
UNKNOWN = 10.0
"""Seconds that a test marked slow is expected to take before it has been measured."""
BUDGET = float(os.environ.get("BUDGET", "400"))
"""Seconds of slow tests in a run."""
OTHERS = "tests of other clients' environments (LLaMA-Factory, ms-swift, oldest releases)"
DURATIONS = Path(__file__).parent.parent / "durations.json"


@functools.cache
def seed() -> str:
    """What samples are drawn by: SEED, or the commit that is checked out."""
    given = os.environ.get("SEED")
    if given:
        return given
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "0"


def is_exhaustive() -> bool:
    return os.environ.get("EXHAUSTIVE") == "1"


def header() -> str:
    """The line that a run begins with."""
    if is_exhaustive():
        return "slow tests: every case (EXHAUSTIVE=1)"
    return f"slow tests: a sample of {BUDGET:.0f} s (BUDGET), SEED={seed()}; {OTHERS}: make exhaustive only"


def chosen(name: str, cases: Sequence[T], corners: int = CORNERS, drawn: int = DRAWN) -> list[T]:
    """The first ``corners`` of the cases of the test ``name`` and ``drawn`` of the others."""
    others = cases[corners:]
    return [*cases[:corners], *random.Random(f"{seed()} {name}").sample(others, min(drawn, len(others)))]


def within_budget(offered: Mapping[str, Sequence[str]], seconds: Mapping[str, float], budget: float) -> set[str]:
    """Of the cases that each test offers, by their names, those that a run takes: first ones before second ones."""
    rounds = [
        (turn, random.Random(f"{seed()} {case}").random(), case)
        for cases in offered.values()
        for turn, case in enumerate(cases)
    ]
    found, left = set(), budget
    for _, _, case in sorted(rounds):
        if seconds[case] <= left:
            found.add(case)
            left -= seconds[case]
    return found


@functools.cache
def recorded() -> dict[str, float]:
    return dict(json.loads(DURATIONS.read_text()))


def expected_seconds(item: pytest.Item) -> float:
    """How long ``item`` takes, by the record; of an unknown case that is marked slow, the mean of the test's cases."""
    own = recorded().get(item.nodeid)
    if own is not None:
        return own
    if not item.get_closest_marker("slow"):
        return 0.0
    test = item.nodeid.partition("[")[0]
    cases = [seconds for name, seconds in recorded().items() if name.partition("[")[0] == test]
    return sum(cases) / len(cases) if cases else UNKNOWN


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Mark the tests that the record knows to be slow."""
    for item in items:
        if expected_seconds(item) >= SLOW:
            item.add_marker(pytest.mark.slow)


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The slow cases that this run does not take."""
    slow: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            slow.setdefault(item.nodeid.partition("[")[0], {})[item.nodeid] = item
    offered: dict[str, list[str]] = {}
    for name, cases in slow.items():
        mark = next(iter(cases.values())).get_closest_marker("matrix")
        offered[name] = chosen(name, [*cases], **(mark.kwargs if mark else {}))
    every = {case: item for cases in slow.values() for case, item in cases.items()}
    taken = within_budget(offered, {case: expected_seconds(item) for case, item in every.items()}, BUDGET)
    return {item for case, item in every.items() if case not in taken}


def record(seconds: Mapping[str, float]) -> None:
    """Write the ``seconds`` that tests took, of those that are slow, into the record."""
    kept = {**recorded(), **{name: round(value, 1) for name, value in seconds.items()}}
    longer = {name: value for name, value in sorted(kept.items()) if value >= SLOW}
    DURATIONS.write_text(json.dumps(longer, indent=0) + "\n")
