"""Dumps of unmodified scripts of the Trainer, of TRL and of plain DeepSpeed: layouts agree."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer_runs import run_trainer

from ds_npu.comparison.compared_steps import compared
from ds_npu.comparison.dump_reader import DumpedRun
from ds_npu.dump_hooks import GRADIENT, GRADIENT_OF_OUTPUT, OUTPUT, WEIGHT

pytestmark = pytest.mark.slow

TRL = str(Path(__file__).parent.parent / "support/trl_script.py")
LAYOUTS = {
    "one process": (1, {}),
    "data": (2, {}),
    "tensor": (2, {"tensor": 2}),
    "context": (2, {"context": 2}),
    "pipeline": (2, {"pipeline": 2}),
}


def dump_of(folder: Path, layout: str, options: dict, script: tuple[str, ...] = ()) -> DumpedRun:
    """The dump of the first two steps of a script for the Trainer."""
    ranks, parallel = LAYOUTS[layout]
    own = folder / layout.replace(" ", "_")
    section = {"parallel": parallel, "dump": {"steps": [0, 1], "folder": str(own / "dump")}}
    more = {"script": script} if script else {}
    samples = 4 // (ranks if layout == "data" else 1)
    usual = {"max_steps": 2, "per_device_train_batch_size": samples, "save_strategy": "no"}
    run_trainer(own, ranks, section, usual | options, **more)
    return DumpedRun(own / "dump")


def check_alike(a: DumpedRun, b: DumpedRun) -> None:
    comparison = compared(a, b)
    assert not comparison.off and not comparison.copies, (comparison.off[:3], comparison.copies[:3])
    kinds = {(row.step, row.kind) for row in comparison.rows}
    assert kinds >= {(step, kind) for step in (0, 1) for kind in (WEIGHT, OUTPUT, GRADIENT_OF_OUTPUT, GRADIENT)}, kinds


@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_the_trainer(tmp_path, layout):
    check_alike(dump_of(tmp_path, "one process", {}), dump_of(tmp_path, layout, {}))


@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize(
    ("kind", "layout"), [("sft", "tensor"), ("sft", "context"), ("sft", "pipeline"), ("dpo", "tensor")]
)
def test_trl(tmp_path, kind, layout):
    options = {"max_length": 32, "bf16": "false", "learning_rate": 0.001, "adam_epsilon": 1e-4}
    one, other = (dump_of(tmp_path, each, options, (TRL, kind)) for each in ("one process", layout))
    check_alike(one, other)
