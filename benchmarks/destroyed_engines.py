"""Memory that stays in use when a script makes engines one after the other and destroys each.

    python benchmarks/destroyed_engines.py

A Llama under ZeRO 3 in bf16 on one simulated NPU. Without a "ds_npu" section it is plain DeepSpeed's engine. Each of
the two has a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import subprocess
import sys
from typing import Any

SIMULATED = (sys.executable, "-m", "ds_npu.cli.main", "sim", "--devices", "1", "--")
VARIANTS: dict[str, dict[str, Any]] = {"plain DeepSpeed": {}, "with a section": {"ds_npu": {}}}
"""By name, what its config has beside the rest."""


def train_one(variant: str) -> None:
    """An engine that does two steps, is destroyed and not referred to."""
    deepspeed, torch, transformers = map(importlib.import_module, ("deepspeed", "torch", "transformers"))
    sizes = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4, use_cache=False))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
    }
    engine = deepspeed.initialize(model=model, config=config | VARIANTS[variant])[0]
    ids = torch.randint(0, 1024, (2, 64), device=engine.device)
    for _ in range(2):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.destroy()


def run(variant: str, engines: int) -> None:
    """A process of one variant; a line for each engine."""
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    for count in range(1, engines + 1):
        train_one(variant)
        gc.collect()
        stays = accelerator.memory_allocated() / 2**20
        print(f"{variant:16} {count} destroyed: {stays:6.1f} MiB in use", flush=True)


def main() -> None:
    """Read the command line; measure one variant after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=4, help="how many, one after the other")
    parser.add_argument("--run", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run(args.run, args.engines)
        return
    for variant in VARIANTS:
        command = (*SIMULATED, sys.executable, __file__, "--engines", str(args.engines), "--run", variant)
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
