"""On simulated NPUs, in bf16: scripts for the Trainer and TRL that know nothing of ds_npu, in any order of events.

A seed of chaos lets the simulated devices work as late, and in as odd an order, as CANN allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradient_rule as rule
import pytest
import tiny_models
import torch
import trainer_runs
from trainer_runs import run_trainer, weights_in

pytestmark = pytest.mark.slow

LAYOUTS = {
    "tensor": (2, {"tensor": 2}),
    "context": (2, {"context": 2}),
    "both": (4, {"tensor": 2, "context": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "pipeline, tensor": (4, {"pipeline": 2, "tensor": 2}),
}
SCRIPTS = {
    "run_clm": (str(trainer_runs.SCRIPT),),
    "sft": (str(trainer_runs.SCRIPT.with_name("trl_script.py")), "sft"),
}
BF16 = {"bf16": "true", "gradient_checkpointing": "true"}
USUAL = {"max_steps": 3, "learning_rate": 0.01, "adam_epsilon": 1e-4, "logging_strategy": "steps", "logging_steps": 1}
CASES = [(script, layout, seed) for script in SCRIPTS for layout in LAYOUTS for seed in (1, 2, 3)]


@dataclass(frozen=True)
class Run:
    """What a run says and saves."""

    ranks: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]

    def losses(self) -> torch.Tensor:
        """Of every micro-batch, and of the evaluation after them."""
        return torch.tensor([*self.ranks[0]["losses"], self.ranks[0]["eval_loss"]], dtype=torch.float64)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Callable[..., Run]]:
    """Runs each script once for each (layout, seed, options); layout None is one process without ds_npu."""
    start = tmp_path_factory.mktemp("start")
    tiny_models.tiny("llama", torch.bfloat16).float().save_pretrained(start)
    found: dict[str, Run] = {}

    def of(script: str, layout: str | None, seed: int | None, options: dict[str, object]) -> Run:
        key = f"{script}, {layout}, {seed}, {options}"
        if key not in found:
            ranks, degrees = (1, None) if layout is None else LAYOUTS[layout]
            folder = tmp_path_factory.mktemp("run")
            model = {"model_name_or_path": start} if script == "run_clm" else {"max_length": 32}
            with pytest.MonkeyPatch.context() as changed:
                changed.setenv("DS_NPU_SIM_CHAOS", "" if seed is None else str(seed))
                section = None if degrees is None else {"parallel": degrees}
                said = run_trainer(folder, ranks, section, USUAL | model | options, script=SCRIPTS[script])
            found[key] = Run(said, weights_in(folder))
        return found[key]

    yield of


@pytest.mark.matrix(corners=1, drawn=0)
@pytest.mark.parametrize(("script", "layout", "seed"), CASES)
def test_a_script_in_bf16(script: str, layout: str, seed: int, run: Callable[..., Run], tmp_path: Path):
    """Within twice the error of one process, and the same to the bit in whatever order the devices work."""
    exact = run(script, None, None, {"bf16": "false"})
    single, found, disturbed = (run(script, *case, BF16) for case in ((None, None), (layout, None), (layout, seed)))
    assert disturbed.ranks == found.ranks and trainer_runs.same(disturbed.weights, found.weights)
    assert all(each["losses"] == found.ranks[0]["losses"] for each in found.ranks)
    bound, error = (torch.dist(each.losses(), exact.losses()) for each in (single, found))
    assert 0 < error <= 2 * bound, (error, bound)
    assert rule.relative(found.weights, exact.weights) <= 2 * rule.relative(single.weights, exact.weights)
