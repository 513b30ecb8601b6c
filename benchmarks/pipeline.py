"""Pipeline schedules: their bubbles in the simulated timeline, and on ranks whose layers sleep.

    python benchmarks/pipeline.py

`bubbles`: the bubble of every schedule beside its paper's formula, and beside torch.distributed.pipelining's, on
which the same timeline runs. `recomputation`: makespans with forwards that run again, in the same timeline.
`sleeping`: 4 ranks on the CPU (gloo) run the schedules with the executor; a stage sleeps for what its forward and both
parts of its backward cost. Sleeping needs no core, so 4 ranks fit on 2. What disturbs a turn only adds to it, so the
least times are compared: that over 1F1B's stands beside what the timeline predicts, and the most (stage, micro-batch)
whose graph or weight part was alive at once beside the schedule's.
pipeline_engines.py measures real models.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import turns
from torch.distributed.pipelining import schedules as of_torch

from ds_npu.parallel.pipeline.executor import PipelineRun
from ds_npu.parallel.pipeline.fill import recomputed
from ds_npu.parallel.pipeline.schedule import Action, Kind, Schedule, from_csv
from ds_npu.parallel.pipeline.schedules import SCHEDULES
from ds_npu.parallel.pipeline.timeline import Costs, Timeline, timeline
from ds_npu.parallel.pipeline.transfers import PipelineLinks, Tensors

CHUNKS = 2
COSTS = (Costs(1, 1, 1), Costs(1.0, 1.2, 0.8), Costs(1.0, 1.0, 0.6))
FORMULAS: dict[str, Callable[[int, Costs], float]] = {
    "gpipe": lambda p, c: (p - 1) * (c.forward + c.backward_input + c.backward_weight),
    "1f1b": lambda p, c: (p - 1) * (c.forward + c.backward_input + c.backward_weight),
    "interleaved": lambda p, c: (p - 1) * (c.forward + c.backward_input + c.backward_weight) / CHUNKS,
    "zb_h1": lambda p, c: (p - 1) * (c.forward + c.backward_input - c.backward_weight),
    "zb_h2": lambda p, c: (p - 1) * (c.forward + c.backward_input - 2 * c.backward_weight),
    "zb_v": lambda p, c: 0.0 if c == COSTS[0] else float("nan"),
}
"""Of ranks, and the costs of all stages of a rank: arXiv 1811.06965, 2401.10241 (table 2, and 4 for zb_v), 2104.04473.

Where there is none (nan), and for the other schedules, none is stated for actions that do not overlap.
"""
OF_TORCH = {
    "gpipe": "ScheduleGPipe",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}
PARTS = ["bubbles", "recomputation", "sleeping"]
V_SHAPES = ("zb_v", "dualpipe_v")


def made(name: str, ranks: int, micro_batches: int) -> Schedule:
    """The schedule ``name``, with CHUNKS stages of a rank where it has no number of its own."""
    return SCHEDULES[name].make(ranks, micro_batches, SCHEDULES[name].chunks or CHUNKS)


def run_of(schedule: Schedule, costs: Costs) -> Timeline:
    """``schedule`` where all stages of a rank together have these ``costs``."""
    share = len(schedule.rows) / schedule.stages
    scaled = (costs.forward * share, costs.backward_input * share, costs.backward_weight * share)
    return timeline(schedule, Costs(*scaled))


# ---- bubbles ----


def schedule_of_torch(name: str, ranks: int, micro_batches: int) -> Schedule:
    """Torch's schedule for the name of ours."""
    theirs: Any = getattr(of_torch, OF_TORCH[name])
    if SCHEDULES[name].chunks == 1:
        rows = _torch_rows_of_one_stage(name, ranks, micro_batches)
    else:
        stages = ranks * CHUNKS
        own = (0, stages - 1) if name in V_SHAPES else (0, ranks)
        given: Any = [_stage_of_torch(ranks, stages, index, name in V_SHAPES) for index in own]
        order = theirs(given, micro_batches, loss_fn=sum).pipeline_order
        rows = [
            [each for action in row if action for each in action.sub_actions or (action,)] for row in order.values()
        ]
    return from_csv("\n".join(",".join(map(str, row)) for row in rows))


def _torch_rows_of_one_stage(name: str, ranks: int, micro_batches: int) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for rank in range(ranks):
        stage = _stage_of_torch(ranks, ranks, rank, False)
        order = getattr(of_torch, OF_TORCH[name])(stage, micro_batches, loss_fn=sum)._get_pipeline_order()
        # Transfers and reductions are left out.
        rows.append([str(each) for each in order[rank] if each and re.fullmatch(r"\d+[FB]\d+", str(each))])
    return rows


def _stage_of_torch(ranks: int, stages: int, index: int, v_shape: bool) -> Any:
    """Enough of a stage for torch's schedules to be made."""
    base: Any = of_torch._PipelineStageBase
    attributes = {
        "num_stages": stages,
        "group_size": ranks,
        "group_rank": min(index, stages - 1 - index) if v_shape else index % ranks,
        "stage_index": index,
        "is_first": index == 0,
        "is_last": index == stages - 1,
        "group": None,
        "submod": None,
        "dw_builder": None,
        "has_backward": True,
        "device": "cpu",
        "stage_index_to_group_rank": {
            stage: min(stage, stages - 1 - stage) if v_shape else stage % ranks for stage in range(stages)
        },
    }
    abstract = {name: lambda *_: None for name in base.__abstractmethods__}
    kind: Any = type("Stage", (base,), {"__init__": lambda *_: None, **abstract, **attributes})
    return kind()


def bubbles(ranks: Sequence[int]) -> None:
    """Print a row for each schedule, number of ranks and costs."""
    print("Bubble of the simulated timeline (of a rank, between its first and last action), F, I, W of a rank's stages")
    print(f"{'':<12}{'ranks':>6}{'F, I, W':>15}{'bubble':>9}{'formula':>9}{'torch':>9}{'kept':>6}{'torch':>7}")
    for name in SCHEDULES:
        for count in ranks:
            micro_batches = 4 * count
            schedule = made(name, count, micro_batches)
            theirs = schedule_of_torch(name, count, micro_batches) if name in OF_TORCH else None
            for costs in COSTS:
                ours = run_of(schedule, costs)
                formula = FORMULAS.get(name, lambda *_: float("nan"))(count, costs)
                other = "-" if theirs is None else f"{run_of(theirs, costs).bubble:.2f}"
                kept = "-" if theirs is None else f"{max(theirs.peak_activations)}"
                said = "-" if formula != formula else f"{formula:.2f}"
                print(
                    f"{name:<12}{count:>6}{_in_words(costs):>15}{ours.bubble:>9.2f}{said:>9}{other:>9}"
                    f"{max(schedule.peak_activations):>6}{kept:>7}"
                )


def recomputation(ranks: Sequence[int]) -> None:
    """Print the makespans of each schedule with and without recomputation, and most activations kept."""
    print("Makespan where F, I, W and R of a rank's stages take 1 each, and (stage, micro-batch) kept at most")
    print(f"{'':<12}{'ranks':>6}{'without':>16}{'in the backward':>17}{'just before':>16}{'moved':>16}")
    unit = COSTS[0]
    for name in SCHEDULES:
        for count in ranks:
            plain = made(name, count, 4 * count)
            inside = run_of(plain, dataclasses.replace(unit, backward_input=2 * unit.backward_input)).makespan
            cells = [f"{inside:.1f}"]
            for schedule in (plain, recomputed(plain), recomputed(plain, 1)):
                cells.append(f"{run_of(schedule, unit).makespan:.1f} ({max(schedule.peak_activations)})")
            print(f"{name:<12}{count:>6}{cells[1]:>16}{cells[0]:>17}{cells[2]:>16}{cells[3]:>16}")


def _in_words(costs: Costs) -> str:
    return f"{costs.forward:g}, {costs.backward_input:g}, {costs.backward_weight:g}"


# ---- layers that sleep ----


class Alive:
    """Counts what a forward leaves for its backward and weight part."""

    now = most = 0

    def __init__(self) -> None:
        Alive.now += 1
        Alive.most = max(Alive.most, Alive.now)

    def __del__(self) -> None:
        Alive.now -= 1


class SleepingFunction(torch.autograd.Function):
    """Sleeps for as long as a stage computes; its graph holds an Alive."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: Alive, costs: Costs, kind: Kind) -> torch.Tensor:
        ctx.kept, ctx.costs, ctx.kind = kept, costs, kind
        time.sleep(costs.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        time.sleep(ctx.costs.of(Action(0, ctx.kind, 0)))
        return dy, None, None, None


@dataclass
class SleepingWeights:
    """The weight part of a backward."""

    kept: Alive | None
    seconds: float

    def compute(self) -> None:
        time.sleep(self.seconds)
        self.kept = None


class SleepingStage:
    """One stage of which nothing but its time is real.

    As engines do, it computes weight gradients in the backward unless the schedule has actions for them.
    """

    def __init__(self, index: int, schedule: Schedule, costs: Costs) -> None:
        self.is_last, self.costs = index == schedule.stages - 1, costs
        self.splits = any(each.kind is Kind.BACKWARD_WEIGHT for each in schedule.actions())
        self.of_output: dict[int, int] = {}
        self.weight = torch.zeros(8, requires_grad=True)
        self.kept: dict[int, Alive] = {}

    def forward(self, micro_batch: int, arrived: Tensors | None) -> Tensors:
        kept = self.kept[micro_batch] = Alive()
        out: torch.Tensor = SleepingFunction.apply(
            self.weight if arrived is None else arrived[0],
            kept,
            self.costs,
            Kind.BACKWARD_INPUT if self.splits else Kind.BACKWARD,
        )
        out = out.sum() if self.is_last else out
        self.of_output[id(out)] = micro_batch
        return (out,)

    def state(self) -> AbstractContextManager[object]:
        return nullcontext()

    def backward(self, outputs: Tensors, gradients: Tensors | None) -> SleepingWeights:
        torch.autograd.backward(outputs, gradients)
        kept = self.kept.pop(self.of_output.pop(id(outputs[0])))
        return SleepingWeights(kept, self.costs.backward_weight if self.splits else 0.0)


def sleeping_rank(rank: int, ranks: int, store: str, args: argparse.Namespace) -> None:
    """Run every schedule by turns, and let rank 0 print."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=120)
    )
    links = PipelineLinks((dist.new_group(), dist.new_group()), torch.device("cpu"))
    unit = Costs(*(args.seconds * each for each in (1.0, 1.2, 0.8)))
    seconds: dict[str, list[float]] = {name: [] for name in args.schedules}
    most: dict[str, int] = {}
    for turn in range(args.turns + 1):
        for name in args.schedules:
            schedule = made(name, ranks, args.micro_batches)
            costs = run_of(schedule, unit).costs
            own = [stage for stage, owner in schedule.rank_of.items() if owner == rank]
            stages = {stage: SleepingStage(stage, schedule, costs) for stage in own}
            Alive.now = Alive.most = 0
            dist.barrier()
            begin = time.perf_counter()
            PipelineRun(schedule, rank, stages, links).run([0] * args.micro_batches)
            took = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            # The first turn opens connections.
            seconds[name] += [took.item()] if turn else []
            most[name] = Alive.most
            dist.barrier()
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, most)
    if rank == 0:
        _print_sleeping(ranks, unit, seconds, every, args)
    dist.destroy_process_group()


def _print_sleeping(
    ranks: int, unit: Costs, seconds: dict[str, list[float]], every: list[dict[str, int]], args: argparse.Namespace
) -> None:
    base = args.schedules[0]
    print(
        f"{ranks} ranks, {args.micro_batches} micro-batches, layers that sleep: F, I, W of a rank "
        f"{1e3 * unit.forward:.0f}, {1e3 * unit.backward_input:.0f}, {1e3 * unit.backward_weight:.0f} ms; "
        f"{args.turns} turns"
    )
    print(f"{'':<12}{'least':>9}{'median':>9}{'predicted':>11}{'of ' + base:>10}{'predicted':>11}{'points':>8}   kept")
    first = run_of(made(base, ranks, args.micro_batches), unit).makespan
    for name in args.schedules:
        schedule = made(name, ranks, args.micro_batches)
        whole = run_of(schedule, unit).makespan
        ratio = min(seconds[name]) / min(seconds[base])
        counted = tuple(each[name] for each in every)
        same = "=" if counted == schedule.peak_activations else "is not"
        print(
            f"{name:<12}{min(seconds[name]):>8.3f}s{statistics.median(seconds[name]):>8.3f}s{whole:>10.3f}s"
            f"{ratio:>10.3f}{whole / first:>11.3f}{100 * (ratio - whole / first):>8.1f}   "
            f"{counted} {same} {schedule.peak_activations}"
        )


def sleeping(args: argparse.Namespace) -> None:
    """Measure on a new world of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(sleeping_rank, (args.ranks, f"{folder}/store", args), args.ranks)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="that sleep (default 4)")
    parser.add_argument("--micro-batches", type=int, default=12, metavar="N", help="of a batch (default 12)")
    parser.add_argument("--seconds", type=float, default=0.03, metavar="S", help="of the forward of a rank's stages")
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="of each schedule")
    parser.add_argument(
        "--schedules", nargs="+", choices=list(SCHEDULES), default=["1f1b", *SCHEDULES], help="1f1b first"
    )
    args = parser.parse_args()
    args.schedules = list(dict.fromkeys(args.schedules))
    print(turns.machine(), flush=True)
    if "bubbles" in args.parts:
        bubbles((2, 4, 8))
    if "recomputation" in args.parts:
        recomputation((2, 4, 8))
    if "sleeping" in args.parts:
        sleeping(args)


if __name__ == "__main__":
    main()
