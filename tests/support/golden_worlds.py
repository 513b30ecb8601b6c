"""Worlds of ranks that record golden cases; importing this imports no torch but what ``ranks`` needs."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from pathlib import Path

from golden_cases import Case

DEADLINE_S = 3600.0
Records = dict[str, dict]
"""By the name of a case and a rank."""


def package() -> Path:
    """The folder of the ds_npu that is recorded."""
    found = importlib.util.find_spec("ds_npu")
    assert found is not None and found.origin is not None
    return Path(found.origin).resolve().parent


def settle(accelerator: str) -> None:
    """Settings of the ranks, which they take from the environment of the process that starts them.

    The working folder must have no ds_npu: the forkserver would import it in place of the one that is recorded.
    """
    os.environ.update(DS_ACCELERATOR=accelerator, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    os.environ.update(RANKS_PRELOAD="golden_preloaded", PYTHONPATH=str(package().parent))
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    assert not Path("ds_npu").exists(), Path.cwd()


def record(cases: list[Case], backend: str) -> Records:
    """Record the cases, a world of ranks for all of its size."""
    from ranks import run_on_ranks

    found: Records = {}
    for world in sorted({each.world for each in cases}):
        mine = [each for each in cases if each.world == world]
        with tempfile.TemporaryDirectory() as folder:
            asked = (mine, folder, str(package()), backend != "gloo")
            run_on_ranks(world, rank, *asked, deadline_s=DEADLINE_S, backend=backend)
            for each in range(world):
                part = json.loads(Path(folder, f"{world}-{each}.json").read_text())
                found |= {f"{name}, rank {each} of {world}": run for name, run in part.items()}
    return found


def rank(cases: list[Case], folder: str, recorded: str, on_npus: bool) -> None:
    """Record the ``cases`` on one rank, which has to have imported the ds_npu of the folder ``recorded``."""
    import golden_runs

    assert str(package()) == recorded, (package(), recorded)

    golden_runs.record(cases, folder, on_npus)
