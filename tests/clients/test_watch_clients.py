"""``watch.finite`` and ``watch.mfu`` in unmodified scripts of the Trainer and TRL: losses stay, modules are named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny_models
import torch
from trainer_runs import completed

pytestmark = pytest.mark.slow

TRL = str(Path(__file__).parent.parent / "support/trl_script.py")
LAYOUTS = {"data": {}, "tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}}
SHORT = {"max_steps": 3, "save_strategy": "no"}
SCRIPTS = {"trainer": ({}, {}), "sft": ({"max_length": 32, "bf16": "false"}, {"script": (TRL, "sft")})}


def run(folder: Path, layout: str, script: str, watch: dict[str, object]) -> tuple[list[float], str]:
    """The losses that rank 0 trained on, and what was printed."""
    options, more = SCRIPTS[script]
    done = completed(folder, 2, {"parallel": LAYOUTS[layout], "watch": watch}, SHORT | options, **more)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "said by 0.json").read_text())["losses"], done.stdout + done.stderr


@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize(("script", "layout"), [(script, layout) for layout in LAYOUTS for script in SCRIPTS])
def test_losses_stay(tmp_path, script, layout):
    plain, _ = run(tmp_path / "plain", layout, script, {"finite": False})
    found, printed = run(tmp_path / "watched", layout, script, {"finite": True, "mfu": True})
    assert found == plain and len(found) > 4
    flop = re.findall(r"step 2: (\S+) FLOP of the model, (\S+) executed", printed)
    assert flop and all(0 < float(model) <= float(executed) for model, executed in flop), printed[-3000:]


def test_the_trainer_is_told_of_the_first_wrong_module(tmp_path):
    model = tiny_models.tiny("llama", torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 3] = torch.nan
    model.save_pretrained(tmp_path / "model")
    options = SHORT | {"model_name_or_path": str(tmp_path / "model")}
    section = {"parallel": {"tensor": 2}, "watch": {"finite": str(tmp_path / "calls")}}
    done = completed(tmp_path / "run", 2, section, options)
    assert done.returncode != 0
    assert "layers.1.mlp.down_proj" in done.stderr and "forward" in done.stderr, done.stderr[-3000:]
    assert list((tmp_path / "calls").iterdir())
