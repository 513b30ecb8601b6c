"""Hugging Face's own ``run_clm.py``, unmodified: train, evaluate, save and resume, on ranks as in one process.

``make exhaustive RUN_CLM=...`` names the script.
"""

from __future__ import annotations

import client_runs
import gradient_rule as rule
import pytest
from clm_runs import ALONE, SAVED_STEP, Layout, run_clm, script, write_inputs

pytestmark = client_runs.ONLY_EXHAUSTIVE

SINGLE = 1e-6
LAYOUTS = {
    "tensor, context": Layout(4, {"tensor": 2, "context": 2}),
    "tensor": Layout(2, {"tensor": 2}),
    "context": Layout(2, {"context": 2}),
    "tensor, ZeRO 3": Layout(2, {"tensor": 2}, 3),
    "data, context": Layout(4, {"context": 2}, 2),
}
SPARSE = {
    "expert": Layout(2, {"expert": 2}),
    "expert, tensor": Layout(4, {"expert": 2, "tensor": 2}),
}
CASES = [*(("llama", name) for name in LAYOUTS), *(("qwen3_moe", name) for name in SPARSE)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """By family, the inputs and the run of one process, with as many micro-batches as several data ranks have."""
    script()
    found = {}

    def of(family, accumulation):
        if family not in found:
            found[family] = write_inputs(tmp_path_factory.mktemp("inputs"), family), {}
        inputs, runs = found[family]
        if accumulation not in runs:
            options = {"gradient_accumulation_steps": accumulation}
            runs[accumulation] = run_clm(inputs, tmp_path_factory.mktemp("alone"), ALONE, options)
        return inputs, runs[accumulation]

    return of


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_whole_run_is_that_of_one_process(family, name, alone, tmp_path):
    layout = (LAYOUTS | SPARSE)[name]
    data = 2 if name.startswith("data") or "expert" in name else 1
    inputs, expected = alone(family, 2 * data)
    found = run_clm(inputs, tmp_path / "run", layout, {})
    assert len(expected.logged) == len(found.logged) >= 6
    for mine, theirs in zip(found.logged, expected.logged, strict=True):
        assert mine == pytest.approx(theirs, rel=SINGLE)
    assert found.evaluated == pytest.approx(expected.evaluated, rel=5 * SINGLE)  # perplexity is exp(loss)
    assert rule.relative(found.weights, expected.weights) <= SINGLE
    checkpoint = tmp_path / "run" / f"checkpoint-{SAVED_STEP}"
    resumed = run_clm(inputs, tmp_path / "resumed", layout, {"resume_from_checkpoint": checkpoint})
    assert resumed.logged == found.logged and resumed.evaluated == found.evaluated
    assert all(weight.equal(found.weights[key]) for key, weight in resumed.weights.items())
