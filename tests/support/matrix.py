"""Which cases of a matrix a run takes: its corners and a sample drawn by the commit's hash, or all of them.

``SEED=1a2b3c4 make test`` draws the sample of another run again; ``make exhaustive`` leaves nothing out.
"""

from __future__ import annotations

import functools
import os
import random
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest


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
        return "matrices: every case (EXHAUSTIVE=1)"
    return f"matrices: corners and a sample, SEED={seed()}"


def chosen(cases: Iterable[object], corners: Sequence[object], drawn: int) -> list[object]:
    """``corners`` and ``drawn`` others of ``cases``; all of them in an exhaustive run. A case is drawn by its repr."""
    others = [case for case in cases if case not in corners]
    if is_exhaustive():
        return [*corners, *others]
    order = random.Random(f"{seed()} {others!r}")
    return [*corners, *order.sample(others, min(drawn, len(others)))]


def matrix(
    names: str, cases: Iterable[object], corners: Sequence[object] = (), drawn: int = 1, ids: object = None
) -> pytest.MarkDecorator:
    """Parametrize ``names`` with the chosen ones of ``cases``."""
    return pytest.mark.parametrize(names, chosen(cases, corners, drawn), ids=ids)
