"""A run on simulated NPUs whose record is then searched for races."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ds_npu.cli.command import refused
from ds_npu.simulator.races import race_report, races
from ds_npu.simulator.replay.recording import read_recording

MOST_RACES = 20
"""Races that are shown."""


def raced_run(program: str, command: Sequence[str], environment: Mapping[str, str], trace: Path, keeps: bool) -> int:
    """Run ``command``, then look for races in the files of ``trace``, which are kept where asked for.

    Returns the command's exit code, or 1 where it is 0 and there is a race.
    """
    code = subprocess.run(command, executable=program, env=environment, check=False).returncode
    try:
        recording = read_recording(trace)
    except ValueError as error:
        return refused("sim", f"--races: {error}", code or 1)
    lines = [*race_report(races(recording), MOST_RACES)]
    if not keeps:
        shutil.rmtree(trace, ignore_errors=True)
    found = "\n".join(lines) or f"no race among {len(recording.actions):,} tasks and waits"
    print(f"ds_npu sim: {found}", file=sys.stderr)
    return code or int(bool(lines))
