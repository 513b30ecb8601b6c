"""DeepSpeed's universal checkpoints: written by ``ds_npu convert``, read at any layout, whoever has written them."""

from __future__ import annotations

import argparse
from pathlib import Path

import layout_lives
import pytest
import universal_lives as lives
from deepspeed.checkpoint import ds_to_universal
from ranks import run_on_ranks

from ds_npu.cli.main import main

TENSOR, PIPELINE = {"parallel": {"tensor": 2}}, {"parallel": {"pipeline": 2}}
EXPERT = {"parallel": {"expert": 2}}
CONTEXT = {"parallel": {"context": 2}}
RING = CONTEXT | {"context_parallel": {"algorithm": "ring"}}


def converted(folder: Path, name: str) -> str:
    target = folder / f"{name} as universal"
    assert main(["convert", str(folder / name), "--to", "universal", "--out", str(target)]) == 0
    return str(target)


def converted_by_deepspeed(folder: Path, name: str) -> str:
    target = folder / f"{name} as universal"
    target.mkdir()
    given = {"input_folder": str(folder / name / f"global_step{lives.STEPS}"), "output_folder": str(target / "first")}
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    rest = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    ds_to_universal.main(argparse.Namespace(**given, **workers, **rest))
    (target / "latest_universal").write_text("first")
    return str(target)


@pytest.mark.slow
def test_written_by_convert(tmp_path, capsys):
    sources = [("llama", 1, TENSOR), ("llama", 3, {}), ("mixtral", 2, EXPERT)]
    run_on_ranks(2, lives.save, sources, str(tmp_path), deadline_s=400.0)
    expected = layout_lives.expected_of("llama", lives.STEPS + lives.LATER)
    folders = [converted(tmp_path, f"{index}") for index in range(3)]
    readers = [1, 3, 2, ("llama", 0, PIPELINE), ("llama", 3, TENSOR), ("llama", 0, {}), ("llama", 1, RING)]
    run_on_ranks(2, lives.go_on, folders[0], readers, expected, deadline_s=400.0)
    run_on_ranks(
        2, lives.go_on, folders[1], [2, ("llama", 1, TENSOR), ("llama", 3, CONTEXT)], expected, deadline_s=400.0
    )
    of_experts = layout_lives.expected_of("mixtral", lives.STEPS + lives.LATER)
    readers = [("mixtral", 3, EXPERT), ("mixtral", 0, {"parallel": {"expert_tensor": 2}})]
    run_on_ranks(2, lives.go_on, folders[2], readers, of_experts, deadline_s=400.0)
    assert main(["convert", str(tmp_path / "0"), "--to", "universal", "--out", folders[0]]) == 1
    assert "is there already" in capsys.readouterr().err


@pytest.mark.slow
def test_written_by_deepspeed(tmp_path):
    run_on_ranks(2, lives.save, [1, 3], str(tmp_path), deadline_s=400.0)
    expected = layout_lives.expected_of("llama", lives.STEPS + lives.LATER)
    readers = [("llama", 1, TENSOR), ("llama", 3, {}), ("llama", 0, PIPELINE), ("llama", 0, {})]
    for index in range(2):
        folder = converted_by_deepspeed(tmp_path, f"{index}")
        run_on_ranks(2, lives.go_on, folder, readers, expected, deadline_s=400.0)
