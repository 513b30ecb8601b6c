"""Runs Hugging Face's ``run_clm.py``, which is not changed, on a tiny model and a text file.

``RUN_CLM`` names the script: transformers' ``examples/pytorch/language-modeling/run_clm.py``, of a release near the
installed one. It is no part of this repository.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny_models
import torch
from client_runs import BATCHES, STAND_INS, TRAINING
from endings import free_port
from safetensors.torch import load_file
from trl_script import tokenizer

SAVED_STEP = TRAINING["save_steps"]
USUAL: dict[str, object] = TRAINING | {
    "do_train": "true",
    "do_eval": "true",
    "block_size": 16,
    "max_grad_norm": 0.5,
    # With the usual epsilon Adam makes a full step of a gradient that is rounding only.
    "learning_rate": 0.01,
    "adam_epsilon": 1e-4,
}


class Layout(NamedTuple):
    """Ranks, their degrees (None: without the section) and the stage of ZeRO."""

    ranks: int
    parallel: dict[str, int] | None
    stage: int = 1


ALONE = Layout(1, None)


@dataclass(frozen=True)
class Run:
    """What a run of the script logged and saved."""

    folder: Path

    @property
    def logged(self) -> list[dict[str, float]]:
        """Of each step and evaluation what is no time."""
        history = json.loads((self.folder / "trainer_state.json").read_text())["log_history"]
        kept = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "learning_rate", "step")
        return [{name: each[name] for name in kept if name in each} for each in history]

    @property
    def evaluated(self) -> dict[str, float]:
        found = json.loads((self.folder / "eval_results.json").read_text())
        return {name: found[name] for name in ("eval_loss", "eval_accuracy", "perplexity", "eval_samples")}

    @property
    def losses(self) -> torch.Tensor:
        found = [each["loss"] for each in self.logged if "loss" in each]
        return torch.tensor([*found, self.evaluated["eval_loss"]], dtype=torch.float64)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "model.safetensors")


def write_inputs(folder: Path, family: str) -> Path:
    """A tiny model of ``family`` with a tokenizer, and texts to train and evaluate on."""
    # Numbers of bf16, so that bf16 and float32 begin at the same model. The script takes the first output for logits,
    # which with router logits is the auxiliary loss.
    changes = {"output_router_logits": False} if family == "qwen3_moe" else {}
    tiny_models.tiny(family, torch.bfloat16, **changes).float().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    for name, count in (("train", 40), ("eval", 12)):
        rows = tiny_models.tokens(count, 21).tolist()
        lines = (" ".join(f"w{word}" for word in row[: 21 - index % 7]) for index, row in enumerate(rows))
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


def script() -> Path:
    """The script that RUN_CLM names; the test is skipped if it names none."""
    if not os.environ.get("RUN_CLM"):
        pytest.skip("name transformers' examples/pytorch/language-modeling/run_clm.py: RUN_CLM=...")
    return Path(os.environ["RUN_CLM"]).resolve(strict=True)


def run_clm(inputs: Path, folder: Path, layout: Layout, options: dict[str, object]) -> Run:
    """A run that writes into ``folder``, started by torchrun, on NPUs by DeepSpeed's launcher."""
    ranks, parallel, stage = layout
    is_cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
    config: dict[str, object] = dict.fromkeys(BATCHES, "auto") | {"bf16": {"enabled": "auto"}}
    config |= {"zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "eps": "auto", "torch_adam": True}}
    if parallel is not None:
        config["ds_npu"] = {"parallel": parallel}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    given: dict[str, object] = USUAL | {"model_name_or_path": inputs, "output_dir": folder, "deepspeed": path}
    given |= {"train_file": inputs / "train.txt", "validation_file": inputs / "eval.txt"} | options
    launcher = ["deepspeed", "--master_port", str(free_port()), "--num_gpus", str(ranks)]
    command = [*(torchrun if is_cpu else launcher), str(script())]
    command += [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    command += ["--use_cpu"] if is_cpu else []
    changed = {"PYTHONPATH": str(STAND_INS), "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(inputs / "cache")}
    done = subprocess.run(
        command, env=os.environ | changed, capture_output=True, text=True, timeout=600, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3500:]
    return Run(folder)
