"""Profiles of unmodified scripts of the Trainer and of TRL: the window's steps, on every rank, and its axes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trainer_runs import run_trainer

pytestmark = pytest.mark.slow

TRL = str(Path(__file__).parent.parent / "support/trl_script.py")
SCRIPTS: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "Trainer": ((), {}),
    "TRL, sft": ((TRL, "sft"), {"max_length": 32, "bf16": "false"}),
    "TRL, dpo": ((TRL, "dpo"), {"max_length": 32, "bf16": "false"}),
}


@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize(
    ("script", "axis"), [("Trainer", "tensor"), ("TRL, sft", "context"), ("Trainer", "data"), ("TRL, dpo", "tensor")]
)
def test_unmodified_scripts(tmp_path, script, axis):
    own, options = SCRIPTS[script]
    parallel = {} if axis == "data" else {axis: 2}
    profile = {"steps": [1, 2], "ranks": "all", "folder": str(tmp_path / "profile")}
    usual = {"max_steps": 4, "per_device_train_batch_size": 2, "save_strategy": "no"}
    more = {"script": own} if own else {}
    run_trainer(tmp_path / "run", 2, {"parallel": parallel, "profile": profile}, usual | options, **more)
    figures = json.loads((tmp_path / "profile/report.json").read_text())
    assert figures["steps"] == [1, 2] and [each["rank"] for each in figures["ranks"]] == [0, 1]
    assert any(axis in each["axes"] for each in figures["slowest_ranks"]), figures["slowest_ranks"]
    for each in figures["ranks"]:
        assert each["activities"]["products"] > 0
        assert sum(each["activities"].values()) == pytest.approx(each["seconds"])
