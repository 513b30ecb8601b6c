"""A run on simulated NPUs whose record is then searched for races."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ds_npu.simulator.child import ended_as, waited_for
from ds_npu.simulator.races import race_report, races
from ds_npu.simulator.replay.recording import read_recording

UNUSED = "no process of the command used an NPU"
MOST_RACES = 20
"""Races that are shown."""


def raced_run(program: str, command: Sequence[str], environment: Mapping[str, str], trace: Path, keeps: bool) -> int:
    """Run ``command``, then look for races in the files of ``trace``, which are kept where asked for.

    Returns the command's exit code, or 1 where it is 0 and there is a race, or no record.
    """
    code = waited_for(program, command, environment)
    try:
        recording = read_recording(trace)
        lines = [*race_report(races(recording), MOST_RACES)]
        found = "\n".join(lines) or f"no race among {len(recording.actions):,} tasks and waits"
    except ValueError as error:
        why = str(error) if any(trace.iterdir()) else UNUSED
        lines, found = [why], f"--races: {why}"
    finally:
        if not keeps:
            shutil.rmtree(trace, ignore_errors=True)
    if code:
        found += f"\nThe command ended with exit code {code}; what it would have done after that was not looked at."
    print(f"ds_npu sim: {found}", file=sys.stderr, flush=True)
    return ended_as(code) or int(bool(lines))
