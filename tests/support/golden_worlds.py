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
"""Records of runs, by the names of the case and the rank."""


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
    found: Records = {}
    for world in sorted({each.world for each in cases}):
        # DeepSpeed keeps engines: what a budget finds held would depend on the cases before.
        left = sorted((each for each in cases if each.world == world), key=lambda each: each.budget is None)
        while left:
            by_rank, ended = _in_one_world(left, world, backend)
            done = set.intersection(*map(set, by_rank))
            if ended and len(done) < len(left):
                # The case during which the world ended; the others get another one.
                died = next(each.name for each in left if each.name not in done)
                by_rank = [{**each, died: {"refused": f"the world of ranks ended: {ended}"}} for each in by_rank]
                done.add(died)
            left = [each for each in left if each.name not in done]
            for number, part in enumerate(by_rank):
                found |= {f"{name}, rank {number} of {world}": part[name] for name in sorted(done)}
    return found


def _in_one_world(cases: list[Case], world: int, backend: str) -> tuple[list[Records], str]:
    """The records of each rank, and why the world ended before the last case."""
    from ranks import run_on_ranks

    ended = ""
    with tempfile.TemporaryDirectory() as folder:
        asked = (cases, folder, str(package()), backend != "gloo")
        try:
            run_on_ranks(world, rank, *asked, deadline_s=DEADLINE_S, backend=backend)
        except Exception as error:
            ended = str(error).strip().splitlines()[-1]
        files = [Path(folder, f"{world}-{each}.json") for each in range(world)]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files], ended


def rank(cases: list[Case], folder: str, recorded: str, on_npus: bool) -> None:
    """Record the ``cases`` on one rank, which has to have imported the ds_npu of the folder ``recorded``."""
    import golden_runs

    assert str(package()) == recorded, (package(), recorded)

    golden_runs.record(cases, folder, on_npus)
