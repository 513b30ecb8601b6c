"""``python train.py`` without a launcher trains as one rank, and one sentence says so."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ds_npu.engine import hooks
from ds_npu.engine.hooks import OF_A_LAUNCHER, OF_OTHERS, be_the_only_rank

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "trainer_script.py"
SAID = "no launcher has started this process, so it trains alone, as one rank on one device"


def test_the_environment_of_one_rank():
    environ = {"MASTER_ADDR": "10.0.0.1"}
    be_the_only_rank(environ)
    port = int(environ.pop("MASTER_PORT"))
    assert environ == {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", port))


@pytest.mark.parametrize("name", [*OF_A_LAUNCHER, *OF_OTHERS])
def test_what_a_launcher_has_set_is_left_alone(name):
    environ = {name: "1"}
    be_the_only_rank(environ)
    assert environ == {name: "1"}


def test_mpi4py_is_asked_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(hooks.importlib.util, "find_spec", lambda name: object() if name == "mpi4py" else None)
    environ: dict[str, str] = {}
    be_the_only_rank(environ)
    assert environ == {}


def train(folder: Path, environ: dict[str, str], *arguments: str) -> tuple[dict[str, object], str]:
    """What the Trainer's script says, and what it printed to stderr."""
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "ds_npu": {"chunked_loss": 8},
    }
    (folder / "ds_config.json").write_text(json.dumps(config))
    settled = {key: value for key, value in os.environ.items() if key not in (*OF_A_LAUNCHER, "MASTER_PORT")}
    options = ["--max_steps", "4", "--per_device_train_batch_size", "2", "--save_steps", "2", "--report_to", "none"]
    done = subprocess.run(
        [
            sys.executable,
            SCRIPT,
            "--deepspeed",
            folder / "ds_config.json",
            "--output_dir",
            folder,
            *options,
            *arguments,
        ],
        env=settled | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "said by 0.json").read_text()), done.stderr


@pytest.mark.slow
def test_the_trainer_saves_and_resumes_without_a_launcher(tmp_path):
    alone, launched = tmp_path / "alone", tmp_path / "launched"
    alone.mkdir()
    launched.mkdir()
    of_one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    found, said = train(alone, {})
    expected, unsaid = train(launched, of_one | {"MASTER_PORT": str(hooks._free_port())})
    assert said.count(SAID) == 1 and SAID not in unsaid
    assert len(found["losses"]) == 4 and found == expected
    resumed, _ = train(alone, {}, "--resume_from_checkpoint", str(alone / "checkpoint-2"))
    assert resumed["losses"] == expected["losses"][2:]
