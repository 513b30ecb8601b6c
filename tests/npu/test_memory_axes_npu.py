"""Keys that save memory, all at once, over context, expert and pipeline ranks of simulated NPUs: to the bit as without.

``ds_npu sim --chaos SEED -- python -m pytest tests/npu/test_memory_axes_npu.py`` runs the streams in the odd orders
that CANN allows (tests/simulator/test_simulator_memory.py).
"""

from __future__ import annotations

from unittest import mock

import deepspeed
import gradient_rule as rule
import kept_state as rig
import pytest
import tiny_models
import torch
from kept_state import Case
from ranks import run_on_ranks

from ds_npu.memory import state_chunks, swapped_activations

CASES = [
    Case(1, parallel=(("context", 2),)),
    Case(2, parallel=(("expert", 2),), family="qwen3_moe"),
    Case(0, parallel=(("pipeline", 2),)),
    Case(1, parallel=(("expert", 2),), family="deepseek_v3"),
]
SWAPPED: dict[str, object] = {"swap": {"activations": True}, "optimizer_memory": {"share_fp32": True, "swap": True}}
RECOMPUTE: list[dict[str, object]] = [
    {"norm": True, "activation_function": True},
    {"layers": "all", "keep": ["matmul", "attention"]},
]
SHARED: list[dict[str, object]] = [
    {"recompute": RECOMPUTE[0], "moe": {"overlap": True}},
    {"recompute": {"modules": ["**.shared_experts"], "keep": ["matmul"]}, "moe": {"overlap": True}},
]
"""Of a family whose shared experts compute while tokens travel, and are computed again."""
CHUNKED = {"chunked_loss": 4}


def run(case: Case, section: dict[str, object]) -> list[torch.Tensor]:
    """Losses, the last norm and the weights of three steps in bf16."""
    model = tiny_models.tiny(case.family, torch.float32, num_hidden_layers=4).to(torch.bfloat16)
    # With it, two runs are not always the same to the bit.
    config = case.config({}, overlap_comm=False)
    config["ds_npu"] |= section
    with mock.patch.object(state_chunks, "CHUNK", rig.CHUNK):
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    return [*rig.train(engine), *rig.weights_of(engine)]


def all_keys(case: Case) -> None:
    rule.without_extension()
    swapped_activations.LEAST_BYTES = 1
    expected = run(case, CHUNKED)
    for section in SHARED if case.family == "deepseek_v3" else ({"recompute": each} for each in RECOMPUTE):
        found = run(case, CHUNKED | SWAPPED | section)
        assert rig.alike(found, expected), (case, section)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=["context", "expert", "pipeline", "shared experts"])
def test_all_keys_at_once_on_an_axis(case):
    run_on_ranks(2, all_keys, case, backend="hccl", sets_device=False, deadline_s=600.0)
