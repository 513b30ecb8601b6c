"""Ranks that are killed before a call that ``killing_calls.c`` counts, in a process that has this library."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("killing_calls.c")
LIBRARY = "COUNTED_KILLS"
"""The variable with the path of the library, in a process that has it."""


def compiled(folder: Path) -> Path:
    """The library, compiled in ``folder``."""
    library = folder / "killing_calls.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


def arm(folder: Path, count: int) -> None:
    """Let this process die before its call ``count``, from 0 on, that changes a file in ``folder``."""
    ctypes.CDLL(os.environ[LIBRARY]).arm(f"{folder}/".encode(), ctypes.c_long(count))


def outcomes_of(library: Path, folder: Path, victim: int, behind: bool, counts: list[int]) -> list[str]:
    """What ``killed_ranks.outcomes`` finds in a process with the library: a word for each count."""
    given = json.dumps([str(folder), victim, behind, counts])
    code = f"import killed_ranks; killed_ranks.tell({given!r})"
    environ = os.environ | {"LD_PRELOAD": str(library), LIBRARY: str(library)}
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return list(json.loads(made.stdout.splitlines()[-1]))
