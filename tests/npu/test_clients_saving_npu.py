"""On simulated NPUs: the Trainer saves a split model, and the survivor of a killed rank says why it stopped."""

from __future__ import annotations

import torch
from dying_ranks import ended
from trainer_runs import run_trainer, same, weights_in


def test_the_trainer_saves_a_split_model(tmp_path):
    """The last save comes right before the script's end, which waits for nothing that an NPU has not done yet."""
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    run_trainer(tmp_path, 2, {"parallel": {"tensor": 2}}, options)
    found = weights_in(tmp_path)
    assert same(found, weights_in(tmp_path / "checkpoint-2"))
    assert found["lm_head.weight"].shape == (64, 32) and found["model.norm.weight"].device == torch.device("cpu")


def test_the_survivor_of_a_killed_rank():
    """Its last line is ds_npu's, below what torch_npu warns of at its exit."""
    said = ended("step", 29768, {}).splitlines()
    assert "rank 0 of 2 stopped because another rank ended first (rank 1 (pid " in said[-1]
    assert said[-1].startswith("[ds_npu] ERROR: ")
