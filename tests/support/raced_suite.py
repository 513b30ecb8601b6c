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

import pytest

from ds_npu.cli.raced_run import UNUSED

LEFT_OUT = {
    "tests/npu/test_context_order_npu.py::test_a_circle_is_found": "HCCL ends a circle of sends by a timeout; the "
    "device is read after that failure, and a wait that failed orders nothing",
    "tests/npu/test_profile_npu.py::test_a_full_disk_ends_the_profile_and_not_the_run": "no file of its process may "
    "grow, and the record of its tasks is one",
}
"""Tests that are left out, each with the reason."""


def nothing_is_drawn(code: int, lines: Sequence[str]) -> bool:
    """Whether pytest has left out every test of the file: those of run_clm need RUN_CLM, others enough BUDGET."""
    left_out = any(line.partition(" in ")[0].endswith(" deselected") for line in lines)
    return code == pytest.ExitCode.NO_TESTS_COLLECTED and left_out


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
    for name in (each for each in LEFT_OUT if each.startswith(f"{file}::")):
        print(f"{file.name}: without {name.partition('::')[2]}: {LEFT_OUT[name]}", flush=True)
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
    results = {file.name: raced(file) for file in files}
    bad = [name for name, (found, _) in results.items() if found]
    empty = [name for name, (_, is_empty) in results.items() if is_empty]
    if empty:
        print(f"NOT RUN: {len(empty)} files of which no test is drawn: {', '.join(empty)}")
    print(f"races: {len(files)} files, {len(bad)} with a race or a failure: {', '.join(bad) or 'none'}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
