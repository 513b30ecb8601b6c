"""What ds_npu costs in a training step: the same script and config without it, with it, and with an empty section.

    python benchmarks/overhead.py

Which code a process runs is settled when it imports DeepSpeed, so each variant has processes of its own. All of them
stay up and take turns of a few steps, forth and back, while the others sleep: a ratio compares turns a second apart,
and drift of the machine falls out. A process may be slower than its twin for its whole life (where its memory lies,
say), so every round starts new ones; `plain again / plain`, which is 1 but for chance, shows what is left of that.
Beside the time of a step stands the CPU time that rank 0 spends in it, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "configs" / "llama-tiny.json"
BATCH, SEQUENCE = 4, 64
PLAIN, AGAIN, ACTIVE, SECTION = "plain", "plain again", "active", "section"
VARIANTS = (PLAIN, AGAIN, ACTIVE, SECTION)
ANSWER = "step times in s: "

Step = tuple[float, float]
"""Time and CPU time of a step, in s."""
CLOCKS = ("time", "CPU time")

Times = dict[str, list[Step]]
"""Of each variant, its steps; or of every cycle of turns, the medians."""


# ---- one rank of one variant: trains when it is told to ----


def ds_config(variant: str, stage: int) -> dict[str, Any]:
    """The config of all variants; one of them has the section, empty."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    return config | {"ds_npu": {}} if variant == SECTION else config


def make_engine(variant: str, stage: int) -> Any:
    """An engine of the variant, sure to be what its name says."""
    if variant in (ACTIVE, SECTION):
        importlib.import_module("ds_npu")
    deepspeed: Any = importlib.import_module("deepspeed")
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    torch.manual_seed(0)
    values = json.loads(MODEL.read_text())
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    )
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config(variant, stage)
    )
    expected = (variant in (ACTIVE, SECTION), "NpuEngine" if variant == SECTION else "DeepSpeedEngine")
    found = ("ds_npu.engine.patches" in sys.modules, type(engine).__name__)
    if found != expected:
        raise RuntimeError(f"{variant}: (DeepSpeed is patched, engine) is {found} and should be {expected}")
    return engine


def train(variant: str, stage: int) -> None:
    """One rank: for every number read from stdin, that many steps; prints the times of each."""
    torch: Any = importlib.import_module("torch")
    engine = make_engine(variant, stage)
    tokens = torch.randint(0, 256, (BATCH, SEQUENCE))
    print(ANSWER, [], flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            start, cpu_start = time.perf_counter(), time.process_time()
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
            times.append([time.perf_counter() - start, time.process_time() - cpu_start])
        print(ANSWER, times, flush=True)
    torch.distributed.destroy_process_group()


# ---- the processes of a variant, and turns between them ----


class World:
    """The ranks of one variant, which sleep between turns."""

    def __init__(self, variant: str, ranks: int, stage: int, log: IO[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        active = variant in (ACTIVE, SECTION)
        shared = {
            "DS_NPU_AUTOLOAD": "1" if active else "0",
            "DS_ACCELERATOR": "cpu",
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
                [sys.executable, __file__, "--train", variant, "--stages", str(stage)],
                env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
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
def worlds(ranks: int, stage: int, order: Sequence[str]) -> Iterator[dict[str, World]]:
    """A world of each variant, started in this order and warm; what they complained of is shown if one fails."""
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        made = {variant: World(variant, ranks, stage, log) for variant in order}
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


def one_round(ranks: int, stage: int, number: int, args: argparse.Namespace) -> Times:
    """Median step times of every cycle, from processes of its own; each round begins with another variant."""
    first = number % len(VARIANTS)
    order = (*VARIANTS[first:], *VARIANTS[:first])
    times: Times = {variant: [] for variant in VARIANTS}
    # Who is started first may get the better memory, so that changes, too.
    with worlds(ranks, stage, order) as made:
        for _ in range(args.cycles):
            cycle: Times = {variant: [] for variant in VARIANTS}
            for variant in (*order, *reversed(order)):
                cycle[variant] += made[variant].take_turn(args.steps)
            for variant in VARIANTS:
                seconds, cpu_seconds = zip(*cycle[variant], strict=True)
                times[variant].append((statistics.median(seconds), statistics.median(cpu_seconds)))
    return times


# ---- what is printed ----


def machine() -> str:
    """Date, processor, memory and versions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers"))
    hardware = f"{os.cpu_count()} cores of {model}, {gib:.0f} GiB"
    return f"{datetime.date.today()}, {hardware}, Python {platform.python_version()}, {versions}"


def print_ratios(rounds: list[Times], clock: int) -> None:
    """Median and quartiles of each variant's ratio to plain: over all cycles, and the medians of the rounds."""
    for variant in VARIANTS[1:]:
        by_round = [
            [other[clock] / plain[clock] for other, plain in zip(times[variant], times[PLAIN], strict=True)]
            for times in rounds
        ]
        low, middle, high = statistics.quantiles([ratio for ratios in by_round for ratio in ratios], n=4)
        medians = ", ".join(f"{statistics.median(ratios):.3f}" for ratios in by_round)
        print(f"  {variant + ' / plain':<20} {middle:.4f}  quartiles {low:.4f} to {high:.4f}  rounds {medians}")


def measure(ranks: int, stage: int, args: argparse.Namespace) -> None:
    """Measure and print one setting."""
    rounds = [one_round(ranks, stage, number, args) for number in range(args.rounds)]
    for clock, name in enumerate(CLOCKS):
        plain_ms = 1000 * statistics.median(step[clock] for times in rounds for step in times[PLAIN])
        print(f"{ranks} rank{'s' * (ranks > 1)}, ZeRO {stage}, {name}: plain {plain_ms:.1f} ms a step")
        print_ratios(rounds, clock)
    sys.stdout.flush()


def give_up(*_: object) -> None:
    """The handler of the alarm."""
    raise TimeoutError("the deadline has passed")


def main() -> None:
    """Read the command line and measure every setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], metavar="N", help="world sizes (default 1 2)")
    parser.add_argument("--stages", type=int, nargs="+", default=[1], metavar="N", help="stages of ZeRO (default 1)")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="times all processes are started anew")
    parser.add_argument("--cycles", type=int, default=10, metavar="N", help="turns forth and back in a round")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="timed steps in a turn")
    parser.add_argument("--deadline", type=int, default=1800, metavar="S", help="stop after so many seconds")
    parser.add_argument("--train", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train, args.stages[0])
        return
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(args.deadline)
    print(machine())
    print(f"{MODEL.stem}, {BATCH} x {SEQUENCE} tokens a rank, fp32, one thread a rank")
    print(
        f"{args.rounds} rounds of {args.cycles} cycles; a cycle is twice {args.steps} steps of each variant", flush=True
    )
    for stage in args.stages:
        for ranks in args.ranks:
            measure(ranks, stage, args)


if __name__ == "__main__":
    main()
