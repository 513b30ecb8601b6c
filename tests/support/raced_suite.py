"""Runs the tests of NPUs once more, each file by itself in ``ds_npu sim --races``; the last line is the sum.

    python tests/support/raced_suite.py [FILE]...

Without files it runs all of tests/npu. A file by itself, since the record of all of them would not fit into memory. The
exit status is 0 only if no test failed and no race was found.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ds_npu.cli.raced_run import UNUSED

NO_TESTS = 5
"""Pytest's exit code where it has run no test."""
NOT_JUDGED = {
    "tests/npu/test_context_order_npu.py::test_a_circle_is_found": "HCCL ends a circle of sends by a timeout; the "
    "device is read after that failure, and a wait that failed orders nothing",
    "tests/npu/test_profile_npu.py::test_a_full_disk_ends_the_profile_and_not_the_run": "no file of its process may "
    "grow, and the record of its tasks is one",
}
"""Tests that are not judged, each with the reason: what they do to the record, or plant in it, is none of a program."""


def nothing_is_drawn(code: int, lines: Sequence[str]) -> bool:
    """Whether pytest has left out every test of the file: those of run_clm need RUN_CLM, others enough BUDGET."""
    return code == NO_TESTS and any(line.partition(" in ")[0].endswith(" deselected") for line in lines)


def complaint(code: int, lines: Sequence[str]) -> str:
    """Why a run with this exit code and output does not pass, "" where it does.

    Where all tests of a file are skipped, ``--races`` has no record and fails.
    """
    if code == 0 or nothing_is_drawn(code, lines):
        return ""
    last = lines[-1] if lines else f"it printed nothing and ended with code {code}"
    all_skipped = last.endswith(UNUSED) and not any(word in line for line in lines for word in ("failed", "error"))
    return "" if code == 1 and all_skipped else last


def raced(file: Path) -> tuple[str, bool]:
    """Run ``file`` with races looked for; the complaint, and whether no test was drawn."""
    begun = time.monotonic()
    command = ["ds_npu", "sim", "--races", "--", sys.executable, "-m", "pytest", "-q", str(file)]
    for name in (each for each in NOT_JUDGED if each.startswith(f"{file}::")):
        print(f"{file.name}: without {name.partition('::')[2]}: {NOT_JUDGED[name]}", flush=True)
        command += ["--deselect", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    lines = done.stdout.splitlines()
    found, is_empty = complaint(done.returncode, lines), nothing_is_drawn(done.returncode, lines)
    said = "NOT RUN: no test of this file is drawn" if is_empty else found or lines[-1]
    print(f"{file.name:40} {time.monotonic() - begun:6.0f} s  {said}", flush=True)
    if found:
        print(done.stdout, flush=True)
    return found, is_empty


def main(words: Sequence[str]) -> int:
    files = [Path(word) for word in words] or sorted(Path("tests/npu").glob("test_*.py"))
    bad, empty = [], []
    for file in files:
        found, is_empty = raced(file)
        bad += [file.name] if found else []
        empty += [file.name] if is_empty else []
    if empty:
        print(f"NOT RUN: {len(empty)} files of which no test is drawn: {', '.join(empty)}")
    print(f"races: {len(files)} files, {len(bad)} with a race or a failure: {', '.join(bad) or 'none'}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
