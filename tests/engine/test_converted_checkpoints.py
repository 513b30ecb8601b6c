"""``ds_npu convert``: the weights that the engine holds, as transformers loads them; what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import layout_lives as lives
import pytest
import torch
import torch.distributed as dist
import trusted_loads
from ranks import run_on_ranks
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from ds_npu.cli.main import main

LAYOUTS = [(1, {"parallel": {"tensor": 2}}), (3, {}), (2, {"parallel": {"pipeline": 2}})]


def saves(folder: str) -> None:
    for index, (stage, section) in enumerate(LAYOUTS):
        engine = lives.engine_of("llama", stage, section, torch.float32)
        lives.step_of(engine, 0, torch.float32)
        engine.save_checkpoint(f"{folder}/{index}")
        if index == 0:
            client_state = {"mine": trusted_loads.Attack()}
            engine.save_checkpoint(f"{folder}/attacked", client_state=client_state)
            engine.module.config.save_pretrained(f"{folder}/model")
        weights = engine.whole_state_dict()
        if dist.get_rank() == 0:
            torch.save(weights, f"{folder}/{index}.pt")
        dist.barrier()


def converted(folder: Path, name: str) -> int:
    given = ["--to", "hf", "--model", str(folder / "model"), "--out", str(folder / f"{name} as hf")]
    return main(["convert", str(folder / name), *given])


def assert_same_in_float32(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """What ds_npu's script in the place of DeepSpeed's makes of shards."""
    asked = [sys.executable, f"{folder}/zero_to_fp32.py", str(folder), f"{folder}.fp32"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = load_file(f"{folder}.fp32/model.safetensors")
    assert found.keys() == expected.keys() and all(each.equal(expected[name]) for name, each in found.items())


@pytest.mark.slow
def test_weights_of_any_layout(tmp_path, capsys):
    run_on_ranks(2, saves, str(tmp_path), deadline_s=400.0)
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace("{", '{"architectures": ["LlamaForCausalLM"],', 1))
    for index in range(len(LAYOUTS)):
        assert converted(tmp_path, f"{index}") == 0, capsys.readouterr().err
        found = LlamaForCausalLM.from_pretrained(tmp_path / f"{index} as hf", dtype=torch.float32).state_dict()
        expected = torch.load(tmp_path / f"{index}.pt")
        assert found.keys() == expected.keys()
        assert all(each.equal(expected[name]) for name, each in found.items())
        if LAYOUTS[index][1]:
            assert_same_in_float32(tmp_path / f"{index}", expected)
    path = next((tmp_path / "1" / "global_step1").glob("*rank_1*optim_states.pt"))
    trusted_loads.flip(path, path.stat().st_size // 2)
    assert converted(tmp_path, "1") == 1 and "the file is damaged" in capsys.readouterr().err
    assert converted(tmp_path, "attacked") in (0, 1) and trusted_loads.RAN == []
