"""Runs ``trainer_script.py``, or another script for the Hugging Face Trainer, under torchrun, as people start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("trainer_script.py")


def run_trainer(folder: Path, ranks: int, *args: object, **kwargs: object) -> list[dict[str, object]]:
    """What each rank says of a run, given as to ``completed``."""
    done = completed(folder, ranks, *args, **kwargs)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"said by {rank}.json").read_text()) for rank in range(ranks)]


def completed(
    folder: Path,
    ranks: int,
    section: dict[str, object] | None,
    options: dict[str, object],
    stage: int = 1,
    script: tuple[str, ...] = (str(SCRIPT),),
) -> subprocess.CompletedProcess[str]:
    """A run that writes to ``folder``; ``options`` are those of ``script``, its path and first arguments."""
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        # Under stage 3, DeepSpeed saves whole weights only where it is told to.
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": "auto", "torch_adam": True}},
    }
    if section is not None:
        config["ds_npu"] = section
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "deepspeed.json"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [*script, "--deepspeed", str(path), "--output_dir", str(folder)]
    command += ["--use_cpu"] if os.environ.get("DS_ACCELERATOR") == "cpu" else []
    usual = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "report_to": "none"}
    usual |= {"lr_scheduler_type": "linear", "logging_strategy": "no"}
    command += [str(word) for name, value in (usual | options).items() for word in (f"--{name}", value)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=os.environ)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
