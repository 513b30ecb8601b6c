"""Runs ``copied_script.py`` on ranks of which some are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("copied_script.py")
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 200


@dataclass(frozen=True)
class Run:
    """What the ranks of a run have written to their screens, and their exit codes."""

    screens: list[str]
    codes: list[int]

    def number(self, pattern: str) -> str:
        """What rank 0 says after ``pattern``."""
        found = re.search(rf"{pattern} (\w+)", self.screens[0])
        assert found is not None, self.screens[0]
        return found[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run(ranks: int, folder: Path, steps: int, section: dict, victims: tuple[int, ...] = (), death: int = -1) -> Run:
    """Train to ``steps``; ``victims`` are killed where ``death`` steps are done."""
    port, started = free_port(), []
    names = ",".join(map(str, victims)) or "none"
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), names, str(death), str(steps)]
    for rank in range(ranks):
        mine = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "127.0.0.1"}
        mine |= {"MASTER_PORT": f"{port}", "PYTHONPATH": f"{ROOT}:{SCRIPT.parent}", "DS_ACCELERATOR": "cpu"}
        mine |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
        started.append(
            subprocess.Popen(
                [*command, json.dumps(section)],
                env=os.environ | mine,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        screens = [each.communicate(timeout=LIMIT_S)[0] for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    codes = [each.returncode for each in started]
    assert all(codes[rank] == -signal.SIGKILL for rank in victims), screens
    return Run(screens, codes)
