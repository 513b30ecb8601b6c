"""Runs the parts of the suite one after the other, whatever each of them says; the last line is the sum.

    python tests/support/parts.py PART [--then PART]...

A part is a command that runs pytest. pytest counts its tests in a JUnit file (``--junit-xml``), which this script
reads. A part that dies before it has written that file counts as one failed test. The exit status is 0 only if that of
every part is.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

THEN = "--then"


@dataclass(frozen=True)
class Counts:
    """How many tests ended in which way."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def counts_in(path: Path) -> Counts | None:
    """The counts in a JUnit file of pytest; None where there is no such file, or it is cut short."""
    try:
        suites = list(ET.parse(path).getroot().iter("testsuite"))
    except (OSError, ET.ParseError):
        return None

    def of(name: str) -> int:
        return sum(int(suite.get(name, 0)) for suite in suites)

    failed, skipped = of("failures") + of("errors"), of("skipped")
    return Counts(max(0, of("tests") - failed - skipped), failed, skipped)


def split(words: Sequence[str]) -> list[list[str]]:
    """The commands between THEN."""
    groups = itertools.groupby(words, key=lambda word: word == THEN)
    return [list(group) for is_between, group in groups if not is_between]


def run(command: Sequence[str]) -> tuple[Counts, bool]:
    """The counts of one part, and whether its exit status was 0."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "counts.xml")
        status = subprocess.run([*command, f"--junit-xml={path}"], check=False).returncode
        counts = counts_in(path)
    if counts is None or (status and not counts.failed):
        print(f"{' '.join(command)} ended with exit status {status}: counted as one failed test", flush=True)
        counts = (counts or Counts()) + Counts(failed=1)
    return counts, status == 0


def main(words: Iterable[str]) -> int:
    results = [run(command) for command in split(list(words))]
    print(f"total: {sum((counts for counts, _ in results), Counts())}", flush=True)
    return int(not all(is_good for _, is_good in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
