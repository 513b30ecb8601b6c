"""Runs Python on simulated NPUs, as a user would: `ds_npu sim -- python`, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0


def sim(*arguments: str, timeout: float = DEADLINE_S, **environ: str) -> subprocess.CompletedProcess[str]:
    """`ds_npu sim ARGUMENTS`."""
    command = [sys.executable, "-m", "ds_npu.cli.main", "sim", *arguments]
    inherited = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}  # conftest.py: cpu
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env={**inherited, **environ}, check=False
    )


def python(code: str, *options: str, timeout: float = DEADLINE_S, **environ: str) -> subprocess.CompletedProcess[str]:
    """`ds_npu sim OPTIONS -- python -c CODE`."""
    return sim(*options, "--", sys.executable, "-c", textwrap.dedent(code), timeout=timeout, **environ)


def printed(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines on stdout of a run that must have succeeded."""
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
