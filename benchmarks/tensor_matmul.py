"""Matrix products in pieces against one collective and one product: an MLP's products, forward and backward.

    python benchmarks/tensor_matmul.py

Ranks on the CPU (gloo), one thread each. All variants live in each process and take turns, forth and back; a ratio is
that of the medians of one cycle, and `one collective again` shows what chance does. gloo's threads share the cores with
the products, so this says what cutting costs, or saves by smaller messages, not what it hides on NPUs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import turns

from ds_npu.parallel.tensor.axis import MatmulCollectives, SerialCollectives
from ds_npu.parallel.tensor.overlapped_matmul import Pipelined

PLAIN = "one collective"
Step = Callable[[MatmulCollectives], None]


def mlp_step(batch: int, sequence: int, hidden: int, width: int) -> Step:
    """The products of a gated MLP of ``hidden`` and, on each rank, ``width``, with weight gradients."""
    size = dist.get_world_size()
    gate, up, down = torch.randn(width, hidden), torch.randn(width, hidden), torch.randn(hidden, width)
    x, dy = (torch.randn(batch, sequence // size, hidden) for _ in range(2))

    def step(collectives: MatmulCollectives) -> None:
        whole, (gated, lifted) = collectives.gather_matmul(x, [gate.t(), up.t()])
        collectives.matmul_scatter([(gated, down.t())]).wait()
        whole_dy, (inner,) = collectives.gather_matmul(dy, [down])
        pending = collectives.matmul_scatter([(inner, gate), (lifted, up)])
        for left, right in ((whole_dy, gated), (inner, whole), (lifted, whole)):
            left.flatten(0, 1).t() @ right.flatten(0, 1)
        pending.wait()

    return step


def ratios(step: Step, variants: dict[str, MatmulCollectives], cycles: int, steps: int) -> dict[str, list[float]]:
    """Of each variant but the first: for every cycle its step time over the first one's. Called by every rank."""
    base, *others = variants
    found: dict[str, list[float]] = {name: [] for name in others}
    for cycle in range(cycles + 1):
        times: dict[str, list[float]] = {name: [] for name in variants}
        for name in (*variants, *reversed(variants)):
            for _ in range(steps):
                dist.barrier()
                begun = time.perf_counter()
                step(variants[name])
                times[name].append(time.perf_counter() - begun)
        if cycle:  # the first one warms up
            for name in others:
                found[name].append(statistics.median(times[name]) / statistics.median(times[base]))
    return found


def measure(rank: int, store: str, args: argparse.Namespace) -> None:
    """One rank; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    group = dist.group.WORLD
    variants: dict[str, MatmulCollectives] = {
        PLAIN: SerialCollectives(group),
        f"{PLAIN} again": SerialCollectives(group),
    }
    variants |= {f"{count} pieces": Pipelined(group, count) for count in args.pieces}
    for batch, sequence in ((1, 2048), (4, 512)):
        found = ratios(mlp_step(batch, sequence, 512, 704), variants, args.cycles, args.steps)
        if rank == 0:
            print(f"{args.ranks} ranks, {batch} x {sequence} tokens, hidden 512, width 704 a rank, fp32")
            for name, each in found.items():
                low, middle, high = statistics.quantiles(each, n=4)
                print(f"  {name} / {PLAIN}: {middle:.3f}  quartiles {low:.3f} to {high:.3f}", flush=True)
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--pieces", type=int, nargs="+", default=[2, 4, 8], metavar="N", help="(default 2 4 8)")
    parser.add_argument("--cycles", type=int, default=10, metavar="N", help="turns forth and back")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps in a turn")
    args = parser.parse_args(arguments)
    print(turns.machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (f"{folder}/store", args), nprocs=args.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
