"""Golden cases on simulated NPUs: the tasks of each stream, peak bytes, and the numbers under three chaos seeds.

``goldens.py`` calls ``record``, which starts `ds_npu sim` once with a trace and once for each seed; within it this file
is a script that records its cases.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import golden_worlds
from golden_npu_cases import npu_cases
from golden_worlds import Records

SEEDS = (1, 2, 3)
DEVICES, SOC = 4, "910_9391"
"""A chip that has every operator."""
CHAOS = "DS_NPU_SIM_CHAOS"
"""The variable in which `ds_npu sim --chaos` gives its seed."""
NUMBERS = ("losses", "norms", "weights", "optimizer", "loaded", "skipped", "refused")
"""Keys that no order of the devices' work may change."""
DEADLINE_S = 3000.0


def record(only: list[str]) -> Records:
    """The records without chaos; of each seed whether its numbers are the same, or which are not."""
    with tempfile.TemporaryDirectory() as trace:
        found = _simulated(only, ["--trace", trace])
    for seed in SEEDS:
        for name, other in _simulated(only, ["--chaos", str(seed)]).items():
            odd = {key: other.get(key) for key in NUMBERS if other.get(key) != found[name].get(key)}
            found[name][f"chaos {seed}"] = odd or "the same numbers"
    return found


def _simulated(only: list[str], options: list[str]) -> Records:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "records.json")
        own = [sys.executable, str(Path(__file__).resolve()), str(target), *only]
        sim = [sys.executable, "-m", "ds_npu.cli.main", "sim", "--devices", str(DEVICES), "--soc", SOC]
        inherited = {
            name: value for name, value in os.environ.items() if name not in ("DS_ACCELERATOR", "RANKS_PRELOAD")
        }
        command = [*sim, *options, "--", *own]
        subprocess.run(command, cwd=folder, env=inherited, check=True, timeout=DEADLINE_S)
        found: Records = json.loads(target.read_text())
    return found


def main(target: str, *only: str) -> None:
    """Record within `ds_npu sim`."""
    golden_worlds.settle("npu")
    cases = [each for each in npu_cases() if not only or any(part in each.name for part in only)]
    cases = [each for each in cases if each.chaos or not os.environ.get(CHAOS)]
    Path(target).write_text(json.dumps(golden_worlds.record(cases, "hccl") if cases else {}))


if __name__ == "__main__":
    main(*sys.argv[1:])
