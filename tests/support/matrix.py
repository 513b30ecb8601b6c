"""Which cases of a slow test a run takes: corners and a sample drawn by the commit's hash, or all of them.

Of the slow cases of a parametrized test the first ``corners`` always run, and ``drawn`` of the others:
``@pytest.mark.matrix(corners=3, drawn=2)``; without the mark one and one. ``SEED=1a2b3c4 make test`` draws the sample
of another run again; ``make exhaustive`` leaves nothing out, nor does naming a single case.
"""

from __future__ import annotations

import functools
import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")
CORNERS, DRAWN = 1, 1


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
    return f"slow tests: corners and a sample, SEED={seed()}"


def chosen(name: str, cases: Sequence[T], corners: int = CORNERS, drawn: int = DRAWN) -> list[T]:
    """The first ``corners`` of the cases of the test ``name`` and ``drawn`` of the others."""
    others = cases[corners:]
    return [*cases[:corners], *random.Random(f"{seed()} {name}").sample(others, min(drawn, len(others)))]


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The slow cases that this run does not take."""
    slow: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") and "[" in item.nodeid:
            slow.setdefault(item.nodeid.partition("[")[0], []).append(item)
    found: set[pytest.Item] = set()
    for name, cases in slow.items():
        mark = cases[0].get_closest_marker("matrix")
        found |= {*cases} - {*chosen(name, cases, **(mark.kwargs if mark else {}))}
    return found
