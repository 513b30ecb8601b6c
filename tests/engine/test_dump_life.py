"""A dump in the life of a run: refusals before the first step, a full disk, steps that never come, calls when off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gradient_rule as rule
import pytest
import tiny_models
import torch
from ranks import run_on_ranks
from small_engines import engine_of, llama, step
from test_cost import calls_of_ds_npu
from torch import nn

from ds_npu.comparison.dump_reader import DumpedRun
from ds_npu.dump_hooks import OUTPUT, WEIGHT


def lives(folder: str) -> None:
    """Everything in one world of one rank; each part in a folder of its own."""
    ids = tiny_models.tokens(2, 8)
    refused(folder)
    only_asked_modules(f"{folder}/modules", ids)
    full_disk_ends_the_dump_alone(f"{folder}/full", ids)
    nothing_is_hooked_between_steps(f"{folder}/between", ids)
    evaluation_is_not_recorded(f"{folder}/evaluation", ids)
    a_model_of_ones_own(f"{folder}/own")
    compiled_is_refused(f"{folder}/compiled", ids)
    a_forward_that_fails_is_not_recorded(folder, ids)


def refused(folder: str) -> None:
    Path(folder, "file").write_text("")
    with pytest.raises(ValueError, match=r"ds_npu\.dump\.folder: .*no dump can be written there"):
        engine_of(llama(), {"dump": {"steps": [0], "folder": f"{folder}/file/dump"}})
    with pytest.raises(ValueError, match=r"ds_npu\.dump\.modules: '\*\*\.q_proj' matches no block, attention, MLP"):
        engine_of(llama(), {"dump": {"steps": [0], "folder": f"{folder}/none", "modules": ["**.q_proj"]}})


def only_asked_modules(folder: str, ids: torch.Tensor) -> None:
    dump = {"steps": [1], "folder": folder, "modules": ["**.self_attn"]}
    engine = engine_of(llama(), {"dump": dump})
    for _ in range(3):
        step(engine, ids)
    run = DumpedRun(Path(folder))
    assert list(run.steps) == [1]
    records = [record for _, record in run.parts(1)]
    attentions = [f"model.layers.{index}.self_attn" for index in range(2)]
    assert [record["name"] for record in records if record["kind"] == OUTPUT] == attentions
    weights = {record["name"] for record in records if record["kind"] == WEIGHT}
    assert weights == {f"{name}.{each}_proj.weight" for name in attentions for each in "qkvo"}


def full_disk_ends_the_dump_alone(folder: str, ids: torch.Tensor) -> None:
    from ds_npu import dump_hooks
    from ds_npu.features.dump import step_records

    said = []
    original = dump_hooks.shutil.disk_usage
    errors = step_records.logger().error
    engine = engine_of(llama(), {"dump": {"steps": [0, 1, 2], "folder": folder}})
    try:
        step_records.logger().error = lambda *words: said.append(words[0] % words[1:])
        dump_hooks.shutil.disk_usage = lambda path: original(path)._replace(free=10)
        for _ in range(3):
            step(engine, ids)
    finally:
        step_records.logger().error, dump_hooks.shutil.disk_usage = errors, original
    assert engine.global_steps == 3 and len(said) == 1 and "step 0 was not dumped" in said[0], said
    assert "The run goes on without it" in said[0]


def nothing_is_hooked_between_steps(folder: str, ids: torch.Tensor) -> None:
    with_key = engine_of(llama(), {"dump": {"steps": [1], "folder": folder}})
    hooks = [len(module._forward_hooks) for module in with_key.module.modules()]
    for index in range(3):
        with calls_of_ds_npu() as called:
            step(with_key, ids)
        records = called["ds_npu.dump_hooks.statistics"]
        assert (records > 0) == (index == 1), (index, records)
        assert [len(module._forward_hooks) for module in with_key.module.modules()] == hooks
        assert "forward" not in vars(with_key.module)
    without = engine_of(llama(), {})
    with calls_of_ds_npu() as called:
        step(without, ids)
    assert not [name for name in called if "dump" in name or "comparison" in name], called


def evaluation_is_not_recorded(folder: str, ids: torch.Tensor) -> None:
    engine = engine_of(llama(), {"dump": {"steps": [0], "folder": folder}})
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.eval()
    with torch.no_grad():
        engine(input_ids=ids)
    engine.train()
    engine.step()
    run = DumpedRun(Path(folder))
    assert sum(record["kind"] == OUTPUT for _, record in run.parts(0)) == 12


def a_model_of_ones_own(folder: str) -> None:
    model = nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 13))
    engine = engine_of(model, {"dump": {"steps": [0], "folder": folder}})
    tokens = torch.randint(0, 13, (2, 5))
    engine.backward(engine(tokens).square().mean())
    engine.step()
    names = [record["name"] for _, record in DumpedRun(Path(folder)).parts(0) if record["kind"] == OUTPUT]
    assert names == ["0", "2"], names


def compiled_is_refused(folder: str, ids: torch.Tensor) -> None:
    model = llama()
    model.model.layers[1].mlp.compile()
    engine = engine_of(model, {"dump": {"steps": [0], "folder": folder}})
    with pytest.raises(ValueError, match=r"ds_npu\.dump: found compiled: model\.layers\.1\.mlp"):
        engine(input_ids=ids, labels=ids)


def a_forward_that_fails_is_not_recorded(folder: str, ids: torch.Tensor) -> None:
    """A script that catches the error goes on; what it dumps is that of a run without it."""
    found = []
    for fails in (False, True):
        own = f"{folder}/fails {fails}"
        engine = engine_of(
            llama(), {"dump": {"steps": [0], "what": "tensors", "folder": own}}, gradient_accumulation_steps=2
        )
        for micro in range(2):
            if fails:
                with pytest.raises(ValueError, match="batch_size"):
                    engine(input_ids=ids.roll(3), labels=ids[:, :3])
            step(engine, ids.roll(micro))
        run = DumpedRun(Path(own))
        found.append([record for _, record in run.parts(0)])
        assert len(list(Path(own).glob("*.safetensors"))) == 1
    assert sum(record["kind"] == OUTPUT for record in found[0]) == 24
    assert [{**each, "tensor": None} for each in found[1]] == [{**each, "tensor": None} for each in found[0]]


def test_a_dump_in_the_life_of_a_run(tmp_path):
    run_on_ranks(1, lives, str(tmp_path))


def own_tokens(folder: str) -> None:
    model = nn.Sequential(*rule.layers())
    config = rule.config(0, torch.float32, {"context": 2})
    config["ds_npu"]["dump"] = {"steps": [0], "folder": folder}
    import deepspeed

    rule.without_extension()
    with pytest.raises(ValueError, match=r"ds_npu\.dump: found with ds_npu\.parallel\.context 2 and a model"):
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)


@pytest.mark.slow
def test_tokens_of_a_context_rank_s_own_are_refused(tmp_path):
    run_on_ranks(2, own_tokens, str(tmp_path))


SCRIPT = """
import sys, torch, deepspeed, deepspeed.ops
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
model = torch.nn.Sequential(torch.nn.Embedding(13, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 13))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds_config.json")
for _ in range(3):
    tokens = torch.randint(0, 13, (2, 5))
    engine.backward(engine(tokens).square().mean())
    engine.step()
"""


@pytest.mark.slow
def test_steps_that_never_come_are_one_message_of_a_plain_script(tmp_path):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "ds_npu": {"dump": {"steps": [1, 7, 9], "folder": "dump"}},
    }
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment | {"MASTER_PORT": "29541"}, capture_output=True, text=True, check=True
    )
    said = [line for line in done.stderr.splitlines() if "never came" in line]
    assert len(said) == 1 and "ds_npu.dump.steps: 7, 9 never came: the run ended behind step 2" in said[0], done.stderr
    assert list(DumpedRun(tmp_path / "dump").steps) == [1]
