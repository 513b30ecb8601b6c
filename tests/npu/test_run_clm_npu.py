"""On simulated NPUs, started by DeepSpeed's launcher, in bf16 with recomputation: Hugging Face's own ``run_clm.py``.

``RUN_CLM=...`` names the script, to ``make exhaustive``, and to ``make test`` for a corner. A seed of chaos lets the
simulated devices work as late, and in as odd an order, as CANN allows.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import gradient_rule as rule
import pytest
import torch
from clm_runs import ALONE, SAVED_STEP, Layout, Run, run_clm, script, write_inputs

pytestmark = [pytest.mark.slow, pytest.mark.matrix(corners=1 if os.environ.get("RUN_CLM") else 0, drawn=0)]

BF16 = {"bf16": "true", "gradient_checkpointing": "true"}
LAYOUTS = {
    "tensor": Layout(2, {"tensor": 2}),
    "context": Layout(2, {"context": 2}),
    "tensor, context": Layout(4, {"tensor": 2, "context": 2}),
    "expert": Layout(2, {"expert": 2}),
}
DISTURBED = [(name, seed) for name in ("tensor, context", "tensor", "context") for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Callable[..., Run]:
    """Runs each of LAYOUTS once for each seed of chaos and set of options; "exact" and "single" are one process."""
    script()
    inputs: dict[str, Path] = {}
    found: dict[str, Run] = {}

    def of(family: str, name: str, seed: int | None = None, **more: object) -> Run:
        if family not in inputs:
            inputs[family] = write_inputs(tmp_path_factory.mktemp("inputs"), family)
        key = f"{family} {name} {seed} {more}"
        if key not in found:
            layout, options = LAYOUTS.get(name, ALONE), more | ({} if name == "exact" else BF16)
            if layout is ALONE:
                options["gradient_accumulation_steps"] = 4 if family == "qwen3_moe" else 2
            with pytest.MonkeyPatch.context() as changed:
                changed.setenv("DS_NPU_SIM_CHAOS", "" if seed is None else str(seed))
                found[key] = run_clm(inputs[family], tmp_path_factory.mktemp("run"), layout, options)
        return found[key]

    return of


def within_twice_the_error_of_one_process(found: Run, single: Run, exact: Run) -> None:
    bound, error = (torch.dist(each.losses, exact.losses) for each in (single, found))
    assert 0 < error <= 2 * bound, (error, bound)
    assert rule.relative(found.weights, exact.weights) <= 2 * rule.relative(single.weights, exact.weights)


def same(one: Run, other: Run) -> bool:
    """To the bit: what both logged, found in the evaluation, and saved."""
    weights = one.weights
    are_equal = all(weight.equal(weights[key]) for key, weight in other.weights.items())
    return one.logged == other.logged and one.evaluated == other.evaluated and are_equal


@pytest.mark.parametrize("name", LAYOUTS)
def test_within_twice_the_error_of_one_process(name: str, run: Callable[..., Run]):
    family = "qwen3_moe" if name == "expert" else "llama"
    found = run(family, name)
    within_twice_the_error_of_one_process(found, run(family, "single"), run(family, "exact"))
    resumed = run(family, name, resume_from_checkpoint=found.folder / f"checkpoint-{SAVED_STEP}")
    assert same(resumed, found)


@pytest.mark.parametrize(("name", "seed"), DISTURBED)
def test_the_same_in_whatever_order_the_devices_work(name: str, seed: int, run: Callable[..., Run]):
    disturbed, found = run("llama", name, seed), run("llama", name)
    assert same(disturbed, found)
    within_twice_the_error_of_one_process(disturbed, run("llama", "single"), run("llama", "exact"))
