"""Runs ``ending_script.py`` on two ranks, without DeepSpeed or under a launcher, and returns the screen."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("ending_script.py")
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 150
LAUNCHERS = ("torchrun", "deepspeed", "accelerate")


def free_port() -> int:
    """A port that no process listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return inherited | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def of_ranks(how: str, size: int = 2) -> list[list[str]]:
    """The lines of each rank's screen, where no launcher ends the others."""
    port = str(free_port())
    ranks = []
    for rank in range(size):
        mine = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}", "MASTER_ADDR": "127.0.0.1"}
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(SCRIPT), "--plainly", how],
                env=_environment() | mine | {"MASTER_PORT": port},
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )
        )
    try:
        return [rank.communicate(timeout=TIMEOUT_SECONDS)[1].decode().splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def of_launcher(launcher: str, how: str) -> list[str]:
    """The lines of the screen of a launcher with two ranks."""
    port = str(free_port())
    start = {
        "torchrun": ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", port],
        "deepspeed": ["deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", port],
        "accelerate": [
            *("accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2", "--num_machines", "1"),
            *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", port),
        ],
    }[launcher]
    command = [sys.executable, "-m", *start, str(SCRIPT), how]
    done = subprocess.run(
        command,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_SECONDS,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode != 0 or how == "fine", done.stdout.decode()
    return done.stdout.decode().splitlines()
