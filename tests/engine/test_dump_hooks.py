"""The one file for runs without ds_npu: its dumps of a plain loop agree with those of ds_npu's layouts."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from dumped_runs import CLIP, LR, STEPS, Fault, Setting, dumped

from ds_npu import dump_hooks
from ds_npu.comparison.compared_steps import compared
from ds_npu.comparison.dump_reader import DumpedRun
from ds_npu.dump_hooks import GRADIENT, GRADIENT_OF_OUTPUT, OUTPUT, STATE, WEIGHT


def plain_run(folder: Path, setting: Setting, fault: Fault | None = None) -> DumpedRun:
    """The dump of a plain loop with a copy of the file."""
    copy = shutil.copy(dump_hooks.__file__, folder.parent / "dump_hooks_copy.py")
    spec = importlib.util.spec_from_file_location("dump_hooks_copy", copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = setting.model()
    if fault is not None:
        fault.before(model)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    made = torch.optim.AdamW(trained, lr=1e-3) if setting.adam else torch.optim.SGD(trained, lr=LR)
    module.Dump(model, made, folder, steps=STEPS, what=setting.what)
    for step in range(max(STEPS) + 1):
        parts = {name: each.chunk(2) for name, each in setting.batch(step).items()}
        for index in range(2):
            with tiny_models.Float64():
                loss = model(**{name: each[index] for name, each in parts.items()}).loss / 2
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        made.step()
        made.zero_grad()
    return DumpedRun(folder)


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize(
    ("layout", "setting"),
    [
        pytest.param("tp2", Setting(adam=True), id="tp2"),
        pytest.param("cp2, ring", Setting(what="tensors", padded=True, adam=True), id="cp2, tensors"),
        pytest.param("one process", Setting(lora=True, adam=True), id="LoRA"),
    ],
)
def test_a_plain_loop_agrees_with_a_layout(tmp_path, layout, setting):
    plain = plain_run(tmp_path / "gpu", setting)
    comparison = compared(plain, dumped(tmp_path, layout, setting))
    first = [row for row in comparison.rows if row.step == 0]
    assert {row.kind for row in first} >= {WEIGHT, OUTPUT, GRADIENT_OF_OUTPUT, GRADIENT, STATE}
    assert not [row for row in first if row.is_off] and not comparison.copies
    bad = compared(
        plain_run(tmp_path / "bad", setting, Fault("bit", NAMES[setting.lora])), dumped(tmp_path, layout, setting)
    )
    assert bad.first_off().kind == WEIGHT and bad.first_off(OUTPUT).name == "model.layers.1.self_attn"


NAMES = {
    False: "model.layers.1.self_attn.o_proj.weight",
    True: "base_model.model.model.layers.1.self_attn.o_proj.weight",
}


def test_the_file_needs_torch_alone(tmp_path):
    shutil.copy(dump_hooks.__file__, tmp_path / "dump_hooks.py")
    script = """
import sys
sys.modules["ds_npu"] = sys.modules["deepspeed"] = sys.modules["safetensors"] = None
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "safetensors" else found(name)
import torch
from dump_hooks import Dump
model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.LayerNorm(4))
optimizer = torch.optim.SGD(model.parameters(), lr=1)
Dump(model, optimizer, "dump", what="tensors")
model(torch.arange(6).view(2, 3)).square().mean().backward()
optimizer.step()
model(torch.arange(6).view(2, 3))
"""
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, env=environment)
    run = DumpedRun(tmp_path / "dump")
    assert list(run.steps) == [0] and (tmp_path / "dump" / "rank-00000-step-0.pt").exists()
    (rank, record), *_ = [part for part in run.parts(0) if part[1]["kind"] == OUTPUT]
    assert run.tensor(0, rank.rank, record).shape == (2, 3, 4)


def test_a_plain_run_of_several_processes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = torch.nn.LayerNorm(4)
    with pytest.raises(ValueError, match="found 2 processes"):
        dump_hooks.Dump(model, torch.optim.SGD(model.parameters(), lr=1), tmp_path)


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    header = {"rank": 0, "world": 1, "layout": {}, "ranks": {}, "what": "statistics"}
    with pytest.raises(dump_hooks.DumpError, match=r"no dump can be written there .* Name another folder"):
        dump_hooks.DumpFile(tmp_path / "file" / "dump", header)
    dump_hooks.DumpFile(tmp_path / "dump", header)
    dump_hooks.DumpFile(tmp_path / "dump", header)
    with pytest.raises(dump_hooks.DumpError, match="it has a dump of another run: world 1, here 2"):
        dump_hooks.DumpFile(tmp_path / "dump", header | {"world": 2})


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, when):
    header = {"rank": 0, "world": 1, "layout": {}, "ranks": {}, "what": "tensors"}
    file = dump_hooks.DumpFile(tmp_path, header)
    before = file.path.read_text()

    def full(tensors: dict, path: Path) -> None:
        path.write_text("a part")
        raise OSError(28, "No space left on device")

    if when == "while":
        monkeypatch.setattr(dump_hooks, "_save_tensors", full)
    else:
        usage = shutil.disk_usage(tmp_path)._replace(free=100)
        monkeypatch.setattr(dump_hooks.shutil, "disk_usage", lambda path: usage)
    values = torch.ones(1000)
    dump_hooks.record_weight(file, {"kind": WEIGHT, "name": "w", "shape": [1000], "order": [0]}, values)
    with pytest.raises(dump_hooks.DumpError, match=r"step 3 was not dumped .*What to do: a disk with more space"):
        file.write(3)
    assert file.path.read_text() == before and [each.name for each in tmp_path.iterdir()] == [file.path.name]


def test_runs_of_numbers():
    numbers = torch.tensor([0, 1, 2, -1, -1, 7, 8, 3])
    assert dump_hooks.runs_of(numbers) == [[0, 3], [-1, 2], [7, 2], [3, 1]]
    assert dump_hooks.runs_of(numbers[:0]) == []
    assert json.dumps(dump_hooks.runs_of(torch.arange(4))) == "[[0, 4]]"
