"""Runs ``copied_script.py`` on ranks of which some are killed."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from ranks import _start_forkserver

SCRIPT = Path(__file__).with_name("copied_script.py")
LIMIT_S = 150.0
LAUNCHERS_S = 30.0
"""How long launchers let other ranks live when one has died, which may wait for it in a collective or a store."""


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


KILLED, TERMINATED_ON_A_SLOW_DISK = ("SIGKILL",), ("SIGTERM", "slow")


def run(
    ranks: int,
    folder: Path,
    steps: int,
    section: dict,
    death: tuple[tuple[int, ...], int] = ((), -1),
    manner: tuple[str, ...] = KILLED,
) -> Run:
    """Train to ``steps``; of ``death``, ranks and a step, the ranks get a signal where so many steps are done."""
    victims, step = death
    _start_forkserver()
    port, context = free_port(), multiprocessing.get_context("forkserver")
    given = [str(folder), ",".join(map(str, victims)) or "none", str(step), str(steps), json.dumps(section), *manner]
    with tempfile.TemporaryDirectory() as screens:
        started = [
            context.Process(target=_life, args=(rank, ranks, port, given, f"{screens}/{rank}")) for rank in range(ranks)
        ]
        for each in started:
            each.start()
        for rank in victims:
            started[rank].join(LIMIT_S)
        ends = time.monotonic() + (LAUNCHERS_S if victims else LIMIT_S)
        for each in started:
            each.join(max(ends - time.monotonic(), 0.0))
        alive = [rank for rank, each in enumerate(started) if each.is_alive()]
        for each in started:
            each.kill()
            each.join()
        found = [Path(screens, f"{rank}").read_text() for rank in range(ranks)]
    assert victims or not alive, (alive, found)
    codes = [int(each.exitcode) for each in started]
    assert all(codes[rank] == -getattr(signal, manner[0]) for rank in victims), (codes, found)
    return Run(found, codes)


def _life(rank: int, ranks: int, port: int, given: list[str], screen: str) -> None:
    """The life of a process that a launcher starts: the script, what ends it, and what is done at its exit."""
    os.dup2(os.open(screen, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in world.items()}, MASTER_ADDR="127.0.0.1")
    sys.argv, code = [str(SCRIPT), *given], 0
    torch.set_num_threads(1)
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except BaseException as error:
        sys.last_value, code = error, 1
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)
