"""Variants of a training step that take turns: what overhead.py and simulator.py share. Prints nothing by itself.

Every variant has processes of its own, one a rank. All of them stay up and take turns of a few steps, forth and back,
while the others sleep: a ratio compares turns a second apart, and drift of the machine falls out. A process may be
slower than its twin for its whole life (where its memory lies, say), so every round starts new ones.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
ANSWER = "step times in s: "
CLOCKS = ("time", "CPU time")

Step = tuple[float, float]
"""Time and CPU time of a step, in s."""

Times = dict[str, list[Step]]
"""Of each variant, its steps; or of every cycle of turns, the medians."""


@dataclass(frozen=True)
class Variant:
    """A command that calls ``serve``, and what its environment has besides what all ranks have."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]


def serve(step: Callable[[], None]) -> None:
    """In a rank: for every number read from stdin, call ``step`` so often and print the times of each."""
    print(ANSWER, [], flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            start, cpu_start = time.perf_counter(), time.process_time()
            step()
            times.append([time.perf_counter() - start, time.process_time() - cpu_start])
        print(ANSWER, times, flush=True)


class World:
    """The ranks of one variant, which sleep between turns."""

    def __init__(self, variant: Variant, ranks: int, log: IO[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {
            "DEEPSPEED_LOG_LEVEL": "error",
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        self.ranks = [
            subprocess.Popen(
                variant.command,
                env=os.environ | shared | variant.environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            for rank in range(ranks)
        ]

    def answers(self) -> list[Step]:
        """The step times of rank 0, when every rank has given its own."""
        answers = [_answer(process) for process in self.ranks]
        return answers[0]

    def take_turn(self, steps: int) -> list[Step]:
        """Step times in s, without the first, which finds the caches full of another variant's data."""
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write(f"{steps + 1}\n")
            process.stdin.flush()
        return self.answers()[1:]

    def end(self, kill: bool) -> None:
        for process in self.ranks:
            if kill:
                process.kill()
            process.communicate()


def _answer(process: subprocess.Popen[str]) -> list[Step]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(ANSWER):
            times: list[Step] = json.loads(line.removeprefix(ANSWER))
            return times
    raise RuntimeError("a rank has ended before its time")


@contextmanager
def _worlds(ranks: int, order: Sequence[Variant]) -> Iterator[dict[str, World]]:
    """A world of each variant, started in this order and warm; what they complained of is shown if one fails."""
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        made = {variant.name: World(variant, ranks, log) for variant in order}
        failed = True
        try:
            for world in made.values():
                world.answers()
                world.take_turn(5)
            yield made
            failed = False
        finally:
            for world in made.values():
                world.end(kill=failed)
            if failed:
                log.seek(0)
                sys.stderr.write(log.read()[-5000:])


def _one_round(variants: Sequence[Variant], ranks: int, number: int, args: argparse.Namespace) -> Times:
    """Median step times of every cycle, from processes of its own; each round begins with another variant."""
    first = number % len(variants)
    order = (*variants[first:], *variants[:first])
    times: Times = {variant.name: [] for variant in variants}
    # Who is started first may get the better memory, so that changes, too.
    with _worlds(ranks, order) as made:
        for _ in range(args.cycles):
            cycle: Times = {variant.name: [] for variant in variants}
            for variant in (*order, *reversed(order)):
                cycle[variant.name] += made[variant.name].take_turn(args.steps)
            for name, steps in cycle.items():
                seconds, cpu_seconds = zip(*steps, strict=True)
                times[name].append((statistics.median(seconds), statistics.median(cpu_seconds)))
    return times


def machine() -> str:
    """Date, processor, memory and versions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers"))
    hardware = f"{os.cpu_count()} cores of {model}, {gib:.0f} GiB"
    return f"{datetime.date.today()}, {hardware}, Python {platform.python_version()}, {versions}"


def _print_ratios(base: str, others: Sequence[str], rounds: list[Times], clock: int) -> None:
    """Median and quartiles of each variant's ratio to ``base``: over all cycles, and the medians of the rounds."""
    for name in others:
        low, middle, high = statistics.quantiles(_ratios(base, name, rounds, clock), n=4)
        medians = ", ".join(f"{statistics.median(_ratios(base, name, [times], clock)):.3f}" for times in rounds)
        print(f"  {f'{name} / {base}':<20} {middle:.4f}  quartiles {low:.4f} to {high:.4f}  rounds {medians}")


def measure(title: str, variants: Sequence[Variant], ranks: int, args: argparse.Namespace) -> dict[str, float]:
    """Measure one setting, print the ratios to the first of ``variants``, and return the medians of those of time."""
    rounds = [_one_round(variants, ranks, number, args) for number in range(args.rounds)]
    base, *others = [variant.name for variant in variants]
    for clock, name in enumerate(CLOCKS):
        base_ms = 1000 * statistics.median(step[clock] for times in rounds for step in times[base])
        print(f"{ranks} rank{'s' * (ranks > 1)}, {title}, {name}: {base} {base_ms:.1f} ms a step")
        _print_ratios(base, others, rounds, clock)
    sys.stdout.flush()
    return {name: statistics.median(_ratios(base, name, rounds, clock=0)) for name in others}


def _ratios(base: str, name: str, rounds: list[Times], clock: int) -> list[float]:
    """Of every cycle."""
    return [
        other[clock] / plain[clock] for times in rounds for other, plain in zip(times[name], times[base], strict=True)
    ]


def parser(description: str | None, rounds: int, cycles: int) -> argparse.ArgumentParser:
    """The options that every such benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ranks", type=int, nargs="+", default=[1, 2], metavar="N", help="world sizes (default 1 2)")
    made.add_argument("--stages", type=int, nargs="+", default=[1], metavar="N", help="stages of ZeRO (default 1)")
    made.add_argument("--rounds", type=int, default=rounds, metavar="N", help="times all processes are started anew")
    made.add_argument("--cycles", type=int, default=cycles, metavar="N", help="turns forth and back in a round")
    made.add_argument("--steps", type=int, default=10, metavar="N", help="timed steps in a turn")
    made.add_argument("--deadline", type=int, default=1800, metavar="S", help="stop after so many seconds")
    return made


def begin(args: argparse.Namespace) -> None:
    """Set the deadline; say where and how is measured."""
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(args.deadline)
    print(machine())
    print(
        f"{args.rounds} rounds of {args.cycles} cycles; a cycle is twice {args.steps} steps of each variant", flush=True
    )


def _give_up(*_: object) -> None:
    raise TimeoutError("the deadline has passed")
