"""On simulated NPUs, started by DeepSpeed's launcher, in bf16 with recomputation: Hugging Face's own ``run_clm.py``.

``make exhaustive RUN_CLM=...`` names the script.
"""

from __future__ import annotations

import client_runs
import gradient_rule as rule
import pytest
import torch
from clm_runs import ALONE, SAVED_STEP, Layout, run_clm, script, write_inputs

pytestmark = client_runs.ONLY_EXHAUSTIVE

BF16 = {"bf16": "true", "gradient_checkpointing": "true"}
LAYOUTS = {
    "tensor, context": Layout(4, {"tensor": 2, "context": 2}),
    "tensor": Layout(2, {"tensor": 2}),
    "context": Layout(2, {"context": 2}),
    "expert": Layout(2, {"expert": 2}),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """By family, the inputs, and the runs of one process in float32 and in bf16."""
    script()
    found = {}

    def of(family):
        if family not in found:
            inputs = write_inputs(tmp_path_factory.mktemp("inputs"), family)
            batch = {"gradient_accumulation_steps": 4 if family == "qwen3_moe" else 2}
            runs = [run_clm(inputs, tmp_path_factory.mktemp("run"), ALONE, batch | more) for more in ({}, BF16)]
            found[family] = inputs, *runs
        return found[family]

    return of


@pytest.mark.parametrize("name", LAYOUTS)
def test_within_twice_the_error_of_one_process(name, alone, tmp_path):
    inputs, exact, single = alone("qwen3_moe" if name == "expert" else "llama")
    found = run_clm(inputs, tmp_path / "run", LAYOUTS[name], BF16)
    bound, error = (torch.dist(each.losses, exact.losses) for each in (single, found))
    assert 0 < error <= 2 * bound, (error, bound)
    assert rule.relative(found.weights, exact.weights) <= 2 * rule.relative(single.weights, exact.weights)
    checkpoint = tmp_path / "run" / f"checkpoint-{SAVED_STEP}"
    resumed = run_clm(inputs, tmp_path / "resumed", LAYOUTS[name], BF16 | {"resume_from_checkpoint": checkpoint})
    assert resumed.logged == found.logged and resumed.evaluated == found.evaluated
    assert all(weight.equal(found.weights[key]) for key, weight in resumed.weights.items())
