"""Runs other projects' command lines in environments of their own (``make clients-env``), as their users start them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = ROOT / "tests" / "clients" / "stand_ins"
ONLY_EXHAUSTIVE = [pytest.mark.slow, pytest.mark.matrix(corners=0, drawn=0)]
"""Marks of tests that need an environment of ``make clients-env``: only `make exhaustive` runs them."""
BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
COMPARED = ("loss", "eval_loss", "grad_norm", "logps/chosen", "logps/rejected", "token_acc")
ALONE = "one_process"
"""Also a folder: LLaMA-Factory splits its command line at spaces."""
TRAINING: dict[str, object] = {
    "dataloader_num_workers": 0,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.001,
    "lr_scheduler_type": "linear",
    "max_steps": 4,
    "logging_steps": 1,
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "report_to": "none",
}
"""Options that these clients hand to the Trainer."""
PARALLEL: dict[str, dict[str, int] | None] = {ALONE: None, "tensor": {"tensor": 2}, "context": {"context": 2}}


def environment(name: str) -> Path:
    """The folder of executables of an environment of ``make clients-env``; fails where it was not made."""
    folder = ROOT / ".clients" / name
    if not (folder / "complete").is_file():
        pytest.fail(f"there is no environment {folder}: say make clients-env")
    return folder / "bin"


def run_in(name: str, command: list[str], **variables: str) -> str:
    """What ``command`` says on standard output; fails with the end of what it says of its errors."""
    folder = environment(name)
    changed = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(STAND_INS), "HF_HUB_OFFLINE": "1"}
    environ = os.environ | changed | {"DS_ACCELERATOR": "cpu"} | variables
    command = [str(folder / command[0]), *command[1:]]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3500:]
    return done.stdout


def write_inputs(name: str, folder: Path) -> Path:
    """A model and data sets in ``folder``, written by the environment's transformers."""
    run_in(name, ["python", str(ROOT / "tests" / "support" / "client_inputs.py"), str(folder)])
    return folder


def write_deepspeed_config(folder: Path, parallel: Mapping[str, int] | None, stage: int = 1) -> Path:
    """A ds_config.json as people have it; with ``parallel`` the section as well."""
    # As the files that both projects bring: the Trainer makes the optimizer.
    config = dict.fromkeys(BATCHES, "auto") | {"zero_allow_untested_optimizer": True}
    config |= {"zero_optimization": {"stage": stage}}
    if parallel is not None:
        config["ds_npu"] = {"parallel": dict(parallel)}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    return path


def logged(folder: Path) -> dict[str, list[float]]:
    """By name, the numbers that the Trainer logged, in order."""
    history = json.loads(newest_state(folder).read_text())["log_history"]
    found = {name: [entry[name] for entry in history if name in entry] for name in COMPARED}
    return {name: numbers for name, numbers in found.items() if numbers}


def newest_state(folder: Path) -> Path:
    """The Trainer's state after the last step."""
    return max(folder.rglob("trainer_state.json"), key=lambda path: json.loads(path.read_text())["global_step"])


def assert_same_run(found: Mapping[str, list[float]], alone: Mapping[str, list[float]]) -> None:
    """The numbers of a run on several ranks are those of one process, but for the order of float32's additions."""
    assert found.keys() == alone.keys() and {"loss", "eval_loss"} <= alone.keys()
    for name, numbers in alone.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(numbers), rtol=1e-5, atol=1e-6, msg=name)


def assert_same_weights(found: Path, alone: Path, *, adapter: bool) -> None:
    """What was saved in ``found`` is what was saved in ``alone``, and the plain library of this process loads it."""
    name = "adapter_model.safetensors" if adapter else "model.safetensors"
    mine, theirs = (load_file(folder / name) for folder in (found, alone))
    assert mine.keys() == theirs.keys()
    for key, weight in theirs.items():
        torch.testing.assert_close(mine[key], weight, rtol=1e-4, atol=1e-5, msg=key)


def as_one_process(train: Callable[[str, Mapping[str, int] | None], Path], *, adapter: bool = False) -> list[Path]:
    """Run ``train(name, parallel)``, which returns where it wrote, for each of PARALLEL, and compare with ALONE."""
    outs = {name: train(name, parallel) for name, parallel in PARALLEL.items()}
    alone = outs.pop(ALONE)
    for out in outs.values():
        assert_same_run(logged(out), logged(alone))
        assert_same_weights(out, alone, adapter=adapter)
    return [*outs.values()]


def loads_in_plain_transformers(name: str, model: Path, adapter: Path | None = None) -> None:
    """The environment's transformers (and PEFT) load what was saved, with every weight."""
    code = (
        "import sys, transformers\n"
        "kind = transformers.AutoModelForCausalLM\n"
        "model, said = kind.from_pretrained(sys.argv[1], output_loading_info=True)\n"
        "assert not said['missing_keys'] and not said['unexpected_keys'], said\n"
        "if len(sys.argv) > 2:\n"
        "    import peft\n"
        "    peft.PeftModel.from_pretrained(model, sys.argv[2]).merge_and_unload()\n"
    )
    run_in(name, ["python", "-c", code, str(model), *([] if adapter is None else [str(adapter)])])


def quoted(options: Mapping[str, object]) -> list[str]:
    """Options of a command line."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]
