"""Runs ``dying_script.py`` on two ranks, of which one is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("dying_script.py")
ROOT = Path(__file__).resolve().parents[2]


def ended(where: str, port: int, environ: dict[str, str]) -> str:
    """What the survivor of two ranks has on its screen; the other is killed in ``where``."""
    ranks = []
    for rank in range(2):
        mine = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        mine |= {"MASTER_PORT": f"{port}", "PYTHONPATH": f"{ROOT}:{SCRIPT.parent}"}
        command = [sys.executable, str(SCRIPT), where]
        ranks.append(
            subprocess.Popen(
                command, env=os.environ | environ | mine, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
        )
    survivor, victim = (rank.communicate(timeout=200)[1].decode() for rank in ranks)
    assert ranks[1].returncode == -signal.SIGKILL, victim
    assert ranks[0].returncode == 1, survivor
    return survivor
