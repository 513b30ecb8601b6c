"""Calls of simulated operators, each on a device of its own, in another process: a device that failed stays failed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def outcomes(program: str, calls: Sequence[str]) -> tuple[dict[str, str], str]:
    """By call the line that ``program``, which gets the calls as arguments, printed for it; and what stderr said."""
    done = subprocess.run(
        [sys.executable, "-c", program, *calls],
        env={**os.environ, "DS_NPU_SIM_DEVICES": str(len(calls))},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return dict(zip(calls, done.stdout.splitlines(), strict=True)), done.stderr
