"""Balance losses, biases and counted loads on simulated NPUs: a step in bf16 against one process in float64."""

from __future__ import annotations

from pathlib import Path

import expert_balance
import gradient_rule as rule
import pytest
import tensor_parallel_rule as dense
import torch
from ranks import run_on_ranks

LOSSES = {"aux_loss": {"coefficient": 0.3, "over": "global_batch"}, "z_loss": 0.1}


def step(parallel: dict, folder: str) -> None:
    rule.without_extension()
    dp = 2 // parallel.get("tensor", 1)
    expected = expert_balance.reference("deepseek_v3", dp, LOSSES)
    moe = LOSSES | {"bias_update_rate": 0.001, "load_report": f"{folder}/load.svg"}
    errors = dense.engine_step("deepseek_v3", 2, torch.bfloat16, {"parallel": parallel, "moe": moe}, expected)
    # The losses are a third of the whole, and rounding flips some choices.
    assert errors.loss <= 4e-3 and errors.gradient <= 0.1, errors


@pytest.mark.slow
def test_a_step(tmp_path):
    run_on_ranks(2, step, {"expert": 2}, str(tmp_path), backend="hccl")
    assert not Path(tmp_path, "load.svg").exists(), "the first interval has not ended"
