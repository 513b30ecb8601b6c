"""The loss of 1,000 steps in bf16 with each variant of ``ds_npu.optimizer_memory``, as a table and as an SVG.

    python benchmarks/optimizer_memory.py --svg docs/images/optimizer_memory.svg

A Llama of two small blocks learns sequences in which a word follows from the one before it, most of the time, on the
CPU, in one process, with AdamW, clipping and ZeRO 1. `other data` is the run without the section on other samples of
the same kind: what differs by no more than it does is noise.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "other data": {},
    "share_fp32": {"share_fp32": True},
    "swap": {"swap": True},
    "moments bf16": {"moments": "bf16"},
    "moments int8": {"moments": "int8"},
    "all": {"swap": True, "share_fp32": True, "moments": "int8"},
}
"""By name, ``ds_npu.optimizer_memory``."""
COLORS = ("#222222", "#aaaaaa", "#1f77b4", "#2ca02c", "#ff7f0e", "#d62728", "#9467bd")
WORDS, SAMPLES, LENGTH = 64, 8, 16
SMOOTH = 25
"""Steps that a point of a curve is the mean of."""


def batch(torch: Any, step: int, seed: int) -> Any:
    """int64 [SAMPLES, LENGTH]: each word is 5 a + 1 of the one before it, and by chance 1 in 10 is any word."""
    draws = torch.Generator().manual_seed(1000 * seed + step)
    ids = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=draws)
    is_any = torch.rand(SAMPLES, LENGTH, generator=draws) < 0.1
    for place in range(1, LENGTH):
        follows = (5 * ids[:, place - 1] + 1) % WORDS
        ids[:, place] = torch.where(is_any[:, place], ids[:, place], follows)
    return ids


def train(name: str, steps: int) -> list[float]:
    """The loss of each step."""
    torch: Any = importlib.import_module("torch")
    deepspeed: Any = importlib.import_module("deepspeed")
    transformers: Any = importlib.import_module("transformers")
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 88, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, use_cache=False, **shape))
    model = model.to(torch.bfloat16).train()
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "ds_npu": {"optimizer_memory": VARIANTS[name]},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for step in range(steps):
        ids = batch(torch, step, int(name == "other data"))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    torch.distributed.destroy_process_group()
    return losses


def run(name: str, steps: int) -> list[float]:
    """``train`` in a process of its own."""
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "losses.json"
        command = [sys.executable, __file__, "--run", name, "--steps", str(steps), "--out", str(out)]
        subprocess.run(command, check=True, env=os.environ | world | {"DS_ACCELERATOR": "cpu"}, stdout=sys.stderr)
        found: list[float] = json.loads(out.read_text())
    return found


def smooth(losses: list[float]) -> list[float]:
    """Means of SMOOTH steps."""
    return [sum(losses[first : first + SMOOTH]) / SMOOTH for first in range(0, len(losses) - SMOOTH + 1, SMOOTH)]


def picture(curves: dict[str, list[float]]) -> str:
    """An SVG of the smoothed curves."""
    wide, high, left = 640, 320, 40
    most = max(max(each) for each in curves.values())
    parts = [f'<rect width="{wide + left + 130}" height="{high + 40}" fill="white"/>']
    for tick in range(int(most) + 1):
        y = 10 + high * (1 - tick / most)
        parts.append(
            f'<path d="M{left} {y:.1f}H{left + wide}" stroke="#ddd"/><text x="10" y="{y + 4:.1f}">{tick}</text>'
        )
    for index, (name, curve) in enumerate(curves.items()):
        places = [(left + wide * i / (len(curve) - 1), 10 + high * (1 - each / most)) for i, each in enumerate(curve)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        color = COLORS[index]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts.append(f'<text x="{left + wide + 10}" y="{24 + 18 * index}" fill="{color}">{name}</text>')
    steps = SMOOTH * len(next(iter(curves.values())))
    parts.append(f'<text x="{left}" y="{high + 32}">loss of {steps} steps, means of {SMOOTH}</text>')
    size = f'width="{wide + left + 130}" height="{high + 40}"'
    style = 'font-family="sans-serif" font-size="13"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="of each run (default 1000)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    parser.add_argument("--svg", type=Path, help="where to draw the curves")
    parser.add_argument("--run", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        args.out.write_text(json.dumps(train(args.run, args.steps)))
        return
    curves, first = {}, None
    for name in args.variants:
        losses = run(name, args.steps)
        curves[name] = smooth(losses)
        first = first or losses
        last = losses[-len(losses) // 10 :]
        gap = sum(abs(a - b) for a, b in zip(curves[name], next(iter(curves.values())), strict=True)) / len(
            curves[name]
        )
        same = "the same to the bit" if losses == first else f"mean difference of curves {gap:.4f}"
        print(f"{name:<14} last tenth {sum(last) / len(last):.4f}   {same}", flush=True)
    if args.svg:
        args.svg.write_text(picture(curves))


if __name__ == "__main__":
    main()
