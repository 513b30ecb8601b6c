"""Muon on two CPU ranks: steps of the optimizer with ds_npu's whole matrices and with DeepSpeed's own code; curves.

    python benchmarks/optimizers.py
    python benchmarks/optimizers.py --curves 1000 --svg docs/images/muon.svg

The variants are engines of one model in the same two processes, and take turns. A step is timed with its forward and
backward, of few tokens, since DeepSpeed's ZeRO 1 orthogonalises behind the backward. DeepSpeed's functions are run as
they are, and compiled by torch where ``--compile`` says so. ``--curves``: the losses of that many steps of a small
model on the same samples, over two tensor ranks, two data ranks, and in one process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers

from ds_npu import svg

WORDS, LENGTH = 64, 16
SMOOTH = 25
"""Steps that a point of a curve is the mean of."""
MUON = {"type": "Muon", "params": {"muon_lr": 0.01, "adam_lr": 3e-3, "momentum": 0.95, "torch_adam": True}}
VARIANTS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "DeepSpeed, ZeRO 0": (0, None),
    "DeepSpeed, ZeRO 1": (1, None),
    "ds_npu, ZeRO 0, data 2": (0, {}),
    "ds_npu, ZeRO 1, data 2": (1, {}),
    "ds_npu, ZeRO 1, tensor 2": (1, {"parallel": {"tensor": 2}}),
}
"""By name, the stage of ZeRO and the section; None: without ds_npu."""
CURVES = {"one process": {}, "data 2": {}, "tensor 2": {"parallel": {"tensor": 2}}}
COLORS = ("#222222", "#1f77b4", "#d62728")


def engine_of(stage: int, section: dict[str, Any] | None, hidden: int, samples: int) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "num_hidden_layers": 2 if hidden < 64 else 4}
    config = transformers.LlamaConfig(vocab_size=WORDS, num_attention_heads=4, use_cache=False, **shape)
    model = transformers.LlamaForCausalLM(config).train()
    ds_config = {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_clipping": 1.0,
        "optimizer": MUON,
        "zero_optimization": {"stage": stage},
    }
    if section is not None:
        ds_config["ds_npu"] = section
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)[0]


def batch(step: int, samples: int) -> torch.Tensor:
    """int64 [samples, LENGTH]: each word is 5 a + 1 of the one before it, and by chance 1 in 10 is any word."""
    draws = torch.Generator().manual_seed(step)
    ids = torch.randint(0, WORDS, (samples, LENGTH), generator=draws)
    is_any = torch.rand(samples, LENGTH, generator=draws) < 0.1
    for index in range(1, LENGTH):
        ids[:, index] = torch.where(is_any[:, index], ids[:, index], (5 * ids[:, index - 1] + 1) % WORDS)
    return ids


def timed(rank: int, folder: str, args: argparse.Namespace) -> None:
    begin(rank, 2, folder)
    if not args.compile:
        torch._dynamo.config.disable = True
    engines = {name: engine_of(*each, args.hidden, 1) for name, each in VARIANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(args.turns + 2):
        for name, engine in engines.items():
            ids = batch(turn, 1)
            dist.barrier()
            start = time.perf_counter()
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            dist.barrier()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        plain = {stage: statistics.median(seconds[f"DeepSpeed, ZeRO {stage}"]) for stage in (0, 1)}
        for name, each in seconds.items():
            middle = statistics.median(each)
            low, _, high = statistics.quantiles(each, n=4)
            spread = f"quartiles {1e3 * low:.1f} to {1e3 * high:.1f}"
            ratios = f"{middle / plain[0]:.2f} of DeepSpeed's ZeRO 0, {middle / plain[1]:.2f} of its ZeRO 1"
            print(f"{name:<26} {1e3 * middle:7.1f} ms  {spread:<26} {ratios}", flush=True)
    dist.destroy_process_group()


def trained(rank: int, name: str, ranks: int, folder: str, args: argparse.Namespace) -> None:
    begin(rank, ranks, folder)
    samples = 8
    engine = engine_of(1, CURVES[name], 32, samples // 2 if name == "data 2" else samples)
    losses = []
    for step in range(args.curves):
        ids = batch(step, samples)
        if name == "data 2":
            ids = ids.chunk(2)[rank]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(whole.item() / ranks)
    if rank == 0:
        torch.save(losses, f"{folder}/{name}.pt")
    dist.destroy_process_group()


def begin(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
    store = f"file://{tempfile.mkdtemp(dir=folder) if ranks == 1 else folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)


def mean_curve(losses: list[float]) -> list[float]:
    return [sum(losses[first : first + SMOOTH]) / SMOOTH for first in range(0, len(losses), SMOOTH)]


def drawn(curves: dict[str, list[float]]) -> str:
    """An SVG of the curves' means of SMOOTH steps."""
    wide, high, left = 640, 320, 40
    means = {name: mean_curve(each) for name, each in curves.items()}
    most, body = max(max(each) for each in means.values()), []
    for tick in range(int(most) + 1):
        body.append(svg.text(10, 14 + high * (1 - tick / most), str(tick)))
    for index, (name, curve) in enumerate(means.items()):
        positions = [
            (left + wide * i / (len(curve) - 1), 10 + high * (1 - each / most)) for i, each in enumerate(curve)
        ]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
        style = {"fill": "none", "stroke": COLORS[index], "stroke_width": 5 - 2 * index, "stroke_opacity": 0.7}
        body.append(svg.element("polyline", points=points, **style))
        body.append(svg.text(left + wide + 10, 24 + 18 * index, name, fill=COLORS[index]))
    steps = len(next(iter(curves.values())))
    body.append(svg.text(left, high + 32, f"Loss of {steps} steps with Muon, means of {SMOOTH}"))
    return svg.drawing(wide + left + 130, high + 40, body, font_size=13)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512, help="size of the model whose steps are timed (512)")
    parser.add_argument("--turns", type=int, default=12, help="of each variant (12)")
    parser.add_argument("--compile", action="store_true", help="let torch compile DeepSpeed's functions, as it does")
    parser.add_argument("--curves", type=int, default=0, metavar="STEPS", help="train instead, so many steps")
    parser.add_argument("--svg", type=Path, help="where to draw the curves")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not args.curves:
            mp.spawn(timed, (folder, args), nprocs=2)
            return
        curves = {}
        for name in CURVES:
            ranks = 1 if name == "one process" else 2
            own = tempfile.mkdtemp(dir=folder)
            mp.spawn(trained, (name, ranks, own, args), nprocs=ranks)
            curves[name] = torch.load(f"{own}/{name}.pt")
            first = curves["one process"]
            gap = max(abs(a / b - 1) for a, b in zip(curves[name], first, strict=True))
            tenth = statistics.mean(curves[name][-len(first) // 10 :])
            print(f"{name:<12} last tenth {tenth:.4f}, largest relative difference of a step {gap:.1e}", flush=True)
    if args.svg:
        args.svg.write_text(drawn(curves))


if __name__ == "__main__":
    main()
