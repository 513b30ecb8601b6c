"""A training step of ds_npu's engine (an empty section) against DeepSpeed's own, both in one process, by turns.

    python benchmarks/engines.py [--processes 6]

overhead.py compares processes, and two processes of the same program differ by a few per cent for as long as they
live. Here ds_npu is loaded on both sides, which costs nothing (``active / plain`` there), and only the engines differ.
Each process prints the median of 40 ratios of CPU time; the last line is the median over the processes. One rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
from deepspeed.utils import groups
from transformers import AutoConfig, AutoModelForCausalLM

import ds_npu

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "configs" / "llama-tiny.json"
CYCLES, STEPS = 40, 10
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 10**9,
}


def start(section: bool) -> Any:
    """An engine, ds_npu's where there is a section."""
    values = json.loads(MODEL.read_text())
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    config = {**CONFIG, "ds_npu": {}} if section else CONFIG
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def turn(engine: Any, ids: torch.Tensor) -> float:
    """CPU seconds of some steps."""
    groups.mpu = engine.mpu  # DeepSpeed keeps that of the engine made last
    begun = time.process_time()
    for _ in range(STEPS):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    return time.process_time() - begun


def compare(section_first: bool) -> None:
    """Print the ratio of this process; which engine is made first changes where its memory lies."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    made = {section: start(section) for section in (section_first, not section_first)}
    plain, ours = made[False], made[True]
    ids = torch.randint(0, 256, (4, 64))
    turn(plain, ids), turn(ours, ids)
    ratios = []
    for _ in range(CYCLES):
        first, second, third, fourth = (turn(engine, ids) for engine in (plain, ours, ours, plain))
        ratios.append((second + third) / (first + fourth))
    print(ds_npu.__version__, type(ours).__name__, type(plain).__name__, statistics.median(ratios), flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description="ds_npu's engine against DeepSpeed's, in one process.")
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--first", choices=["plain", "section"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first:
        compare(options.first == "section")
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29791"}
    quiet = {"DS_ACCELERATOR": "cpu", "DEEPSPEED_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1"}
    found = []
    for number in range(options.processes):
        command = [sys.executable, "-W", "ignore", __file__, "--first", "section" if number % 2 else "plain"]
        environment = {**os.environ, **world, **quiet, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
        ours, plain, ratio = done.stdout.split()[-3:]
        if (ours, plain) != ("NpuEngine", "DeepSpeedEngine"):
            raise SystemExit(f"compared {ours} with {plain}, not ds_npu's engine with DeepSpeed's")
        found.append(float(ratio))
        print(f"process {number + 1}: section / plain {found[-1]:.4f}", flush=True)
    print(f"section / plain {statistics.median(found):.4f}, median over {options.processes} processes")


if __name__ == "__main__":
    main()
