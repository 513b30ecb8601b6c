"""Context parallelism: work, bytes and memory of each rank, counted; time against one process that does it all.

    python benchmarks/context_parallel.py

Ranks on the CPU (gloo), one thread each. Times are those of two ranks on two cores: both do their part, then one of
them does all of it while the other waits, forth and back in one run; a ratio is that of one cycle. What messages cost
on the links of NPUs this does not say; tests/ranks/test_context_bytes.py holds their size to what an algorithm needs.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import turns

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.ops.attention import CAUSAL, FULL, Mask, Options, attention
from ds_npu.parallel.context.attention import context_attention
from ds_npu.parallel.context.axis import context_axis
from ds_npu.parallel.context.kernel_calls import block_calls
from ds_npu.parallel.context.load_balance import Tokens, shard_documents, shard_evenly
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

WIDTH = 64
"""Of a head."""


def name_of(algorithm: ContextAlgorithm) -> str:
    rings = f" {algorithm.ring // algorithm.window} x {algorithm.window}" if algorithm.window > 1 else ""
    inside = f" {algorithm.ulysses} x {algorithm.ring}" if algorithm.name == "hybrid" else ""
    return ("double ring" if rings else algorithm.name) + rings + inside


def from_tests(module: str) -> Any:
    """What the tests count with."""
    sys.path.append(str(turns.ROOT / "tests" / "support"))
    return importlib.import_module(module)


def on_ranks(size: int, body: Callable[..., None], *args: object) -> None:
    """Call ``body(*args)`` on each rank of a world."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (f"{folder}/store", size, body, args), nprocs=size)


def _rank(rank: int, store: str, size: int, body: Callable[..., None], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    body(*args)
    dist.destroy_process_group()


# ---- work ----


def documents_of(total: int, draw: random.Random) -> list[range]:
    """Packed one behind the other, from 10 to 3000 tokens, as many short ones as long ones by their logarithm."""
    found: list[range] = []
    at = 0
    while at < total:
        length = int(math.exp(draw.uniform(math.log(10), math.log(3000))))
        found.append(range(at, min(at + length, total)))
        at = found[-1].stop
    return found


def flops(tokens: Tokens, rank: int, source: int) -> int:
    """Of a forward step's two products, for each head: the kernel's calls, each score of which takes 4 * width."""
    calls = block_calls(tokens, rank, source, (None, 0), True)
    return sum(4 * WIDTH * call.pairs for call in calls)


def print_work(total: int) -> None:
    """Deviation from equal: of all steps together, and of the step but the first where it is largest."""
    for size in (2, 4, 8, 16):
        algorithm = ContextAlgorithm(1, size)
        packed = shard_documents(1, total, documents_of(total, random.Random(size)), algorithm)
        for name, tokens in (("causal", shard_evenly(total, algorithm)), ("packed", packed)):
            work = [[flops(tokens, rank, (rank - step) % size) for rank in range(size)] for step in range(size)]
            of_ranks = [sum(steps) for steps in zip(*work, strict=True)]
            later = max(_deviation(ranks) for ranks in work[1:])
            print(
                f"  {name}, {size:2} ranks: {sum(of_ranks) / 1e9:.1f} GFLOP a head, {100 * _deviation(of_ranks):.2f} % "
                f"from equal; within a step {100 * later:.2f} %",
                flush=True,
            )


def _deviation(work: Sequence[int]) -> float:
    mean = statistics.mean(work)
    return max(abs(each - mean) for each in work) / mean


# ---- bytes ----

SENDING = [
    ContextAlgorithm(8),
    ContextAlgorithm(1, 8),
    ContextAlgorithm(1, 8, kv_cache="half"),
    ContextAlgorithm(1, 8, kv_cache="full"),
    ContextAlgorithm(1, 8, 2),
    ContextAlgorithm(2, 4),
    ContextAlgorithm(1, 8, gather=True),
]


def count_bytes(total: int, heads: int, key_heads: int) -> None:
    """One rank; rank 0 prints. Every rank's bytes are compared with what it must send."""
    wire, traffic = from_tests("wire"), from_tests("context_traffic")
    topology = Topology(Degrees(cp=dist.get_world_size()))
    for algorithm in SENDING:
        axis = context_axis(topology, algorithm)
        leaves, dout = inputs(total // axis.size, heads, key_heads, torch.bfloat16)
        forth, back = wire.Wire(), wire.Wire()
        with forth:
            out = context_attention(*leaves, axis, Options(mask=CAUSAL))
        with back:
            torch.autograd.grad(out, leaves, dout)
        least = traffic.Traffic(algorithm, (total // axis.size,) * axis.size, heads, key_heads, WIDTH, WIDTH, 2)
        wanted = [sum(way(least, axis.rank).values()) for way in (traffic.forward, traffic.backward)]
        found = [sum(way.leaving.values()) for way in (forth, back)]
        ratios: list[Any] = [None] * axis.size
        dist.all_gather_object(ratios, sum(found) / sum(wanted))
        if axis.rank == 0:
            forward, backward = (each / 2**20 for each in found)
            print(
                f"  {name_of(algorithm)}, kv_cache {algorithm.kv_cache}: {forward:.2f} MiB forward, {backward:.2f} MiB "
                f"backward; counted / needed {min(ratios):.4f} to {max(ratios):.4f}",
                flush=True,
            )


def inputs(
    tokens: int, heads: int, key_heads: int, dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """q, k and v, and the gradient of out."""
    q, k, v, dout = (torch.randn(1, tokens, n, WIDTH, dtype=dtype) for n in (heads, key_heads, key_heads, heads))
    return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), dout


# ---- memory ----

HOLDING = {
    1: [ContextAlgorithm()],
    2: [ContextAlgorithm(2), ContextAlgorithm(1, 2), ContextAlgorithm(1, 2, gather=True)],
    4: [ContextAlgorithm(4), ContextAlgorithm(1, 4), ContextAlgorithm(2, 2), ContextAlgorithm(1, 4, gather=True)],
    8: [
        ContextAlgorithm(8),
        ContextAlgorithm(1, 8),
        ContextAlgorithm(1, 8, 2),
        ContextAlgorithm(2, 4),
        ContextAlgorithm(1, 8, gather=True),
    ],
}


def count_memory(algorithms: Sequence[ContextAlgorithm]) -> None:
    """One rank; rank 0 prints the peaks, in sizes of its query."""
    memory = from_tests("context_memory")
    topology = Topology(Degrees(cp=dist.get_world_size()))
    for algorithm in algorithms:
        axis = context_axis(topology, algorithm)
        mask = FULL if algorithm.gather else CAUSAL
        found = []
        for heads, key_heads, dtype in ((8, 8, torch.float32), (8, 8, torch.bfloat16), (8, 1, torch.bfloat16)):
            each = memory.bytes_of(heads, key_heads, dtype)
            peak = memory.counted(axis, heads, key_heads, dtype, mask)
            found.append(f"{peak / each.query:6.2f} ({peak / memory.one_process_needs(each):.2f})")
        if axis.rank == 0:
            name = f"{axis.size} ranks, {name_of(algorithm)}" if axis.size > 1 else "one process"
            print(f"  {name:<27}{'  '.join(found)}", flush=True)


# ---- time ----


@dataclass(frozen=True)
class Timed:
    """An attention of two ranks."""

    algorithm: ContextAlgorithm
    heads: int = 2
    key_heads: int = 2
    dtype: torch.dtype = torch.float32
    mask: Mask = CAUSAL


TIMED = {
    "ring": Timed(ContextAlgorithm(1, 2)),
    "ring, bfloat16, 4 heads, 1 of keys": Timed(ContextAlgorithm(1, 2), 4, 1, torch.bfloat16),
    "ulysses": Timed(ContextAlgorithm(2)),
    "ring, every key": Timed(ContextAlgorithm(1, 2), mask=FULL),
    "allgather, every key": Timed(ContextAlgorithm(1, 2, gather=True), mask=FULL),
}


def steps(timed: Timed, topology: Topology, total: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward and backward of this rank's part, and of all of it, which rank 0 does and the others do not."""
    axis, options = context_axis(topology, timed.algorithm), Options(mask=timed.mask)

    def part(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return context_attention(q, k, v, axis, options)

    def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, options)[0]

    return _step(part, timed, total // axis.size), _step(whole, timed, total if axis.rank == 0 else 1)


def _step(attend: Callable[..., torch.Tensor], timed: Timed, tokens: int) -> Callable[[], None]:
    leaves, dout = inputs(tokens, timed.heads, timed.key_heads, timed.dtype)

    def step() -> None:
        torch.autograd.grad(attend(*leaves), leaves, dout)

    return step


def measure(names: Sequence[str], total: int, cycles: int) -> None:
    """One rank; rank 0 prints."""
    topology = Topology(Degrees(cp=dist.get_world_size()))
    for name in names:
        part, whole = steps(TIMED[name], topology, total)
        ratios = []
        for cycle in range(cycles + 1):
            first, second, third, fourth = (clock(each) for each in (part, whole, whole, part))
            if cycle:  # the first one warms up
                ratios.append((first + fourth) / (second + third))
        if dist.get_rank() == 0:
            times, cpu_times = torch.stack(ratios).T.tolist()
            low, middle, high = (2 * each for each in statistics.quantiles(times, n=4))
            print(
                f"  {name}: {middle:.3f}  quartiles {low:.3f} to {high:.3f}  "
                f"CPU time {statistics.median(cpu_times):.3f}  one process {second[0]:.2f} s",
                flush=True,
            )


def clock(call: Callable[[], None]) -> torch.Tensor:
    """Seconds until the last rank has done it, and CPU seconds of all ranks together."""
    dist.barrier()
    begun, cpu_begun = time.perf_counter(), time.process_time()
    call()
    cpu = torch.tensor(time.process_time() - cpu_begun, dtype=torch.float64)
    dist.all_reduce(cpu)
    return torch.stack([torch.tensor(time.perf_counter() - begun, dtype=torch.float64), cpu])


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, count and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence", type=int, default=16384, metavar="N", help="tokens (default 16384)")
    parser.add_argument("--cycles", type=int, default=6, metavar="N", help="turns forth and back (default 6)")
    parser.add_argument("--timed", nargs="+", choices=TIMED, default=list(TIMED), help="what is timed (default all)")
    parser.add_argument("--count", action="store_true", help="measure no times")
    args = parser.parse_args(arguments)
    print(turns.machine(), flush=True)
    if not args.count:
        print(
            f"time, {args.sequence} tokens, causal unless every key is said, heads of {WIDTH}, 2 of them in float32 "
            f"unless others are said: 2 ranks / (one process / 2), CPU time of both / one process; load before "
            f"{os.getloadavg()[0]:.2f}",
            flush=True,
        )
        on_ranks(2, measure, args.timed, args.sequence, args.cycles)
    print(f"work, {args.sequence} tokens: counted FLOP of the forward kernel's calls", flush=True)
    print_work(args.sequence)
    print(f"bytes that a rank sends: 8 ranks, 512 tokens, 32 heads of {WIDTH}, 8 of keys, bfloat16", flush=True)
    on_ranks(8, count_bytes, 512, 32, 8)
    print("peak memory of a rank with as many tokens, in sizes of its query (in peaks of one process with its tokens)")
    print(f"{'':<31}float32, MHA   bfloat16, MHA   bfloat16, 8 heads, 1 of keys", flush=True)
    for size, algorithms in HOLDING.items():
        on_ranks(size, count_memory, algorithms)
    return 0


if __name__ == "__main__":
    sys.exit(main())
