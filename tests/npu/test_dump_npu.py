"""A dump of two NPUs against one of a plain loop on the CPU: they agree, and a flipped bit on the NPUs is named."""

from __future__ import annotations

from pathlib import Path

import dumped_runs
import pytest
import torch
from dumped_runs import LAYOUTS, Fault, Setting, train
from ranks import run_on_ranks

from ds_npu.comparison.compared_steps import compared
from ds_npu.comparison.dump_reader import DumpedRun
from ds_npu.dump_hooks import GRADIENT, GRADIENT_OF_OUTPUT, OUTPUT, STATE, WEIGHT, Dump

SETTING = Setting(adam=True, dtype=torch.float32)
WEIGHT_NAME = "model.layers.1.self_attn.o_proj.weight"


def on_the_cpu(folder: Path) -> DumpedRun:
    model = SETTING.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    Dump(model, optimizer, folder, steps=dumped_runs.STEPS)
    for step in range(2):
        parts = {name: each.chunk(2) for name, each in SETTING.batch(step).items()}
        for index in range(2):
            (model(**{name: each[index] for name, each in parts.items()}).loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), dumped_runs.CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return DumpedRun(folder)


@pytest.mark.parametrize("layout", ["tp2", "cp2, ring"])
def test_npus_against_the_cpu(tmp_path, layout):
    world = LAYOUTS[layout]
    cpu = on_the_cpu(tmp_path / "cpu")
    run_on_ranks(2, train, str(tmp_path / "npu"), world, SETTING, None, backend="hccl")
    comparison = compared(cpu, DumpedRun(tmp_path / "npu"))
    assert not comparison.off and not comparison.copies, (comparison.off[:3], comparison.copies[:3])
    kinds = {row.kind for row in comparison.rows if row.step == 0}
    assert kinds == {WEIGHT, OUTPUT, GRADIENT_OF_OUTPUT, GRADIENT, STATE}
    run_on_ranks(2, train, str(tmp_path / "bad"), world, SETTING, Fault("bit", WEIGHT_NAME), backend="hccl")
    bad = compared(cpu, DumpedRun(tmp_path / "bad"))
    assert bad.first_off().name == WEIGHT_NAME and bad.first_off(OUTPUT).name == "model.layers.1.self_attn"
