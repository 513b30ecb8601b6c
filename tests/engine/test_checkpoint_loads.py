"""Checkpoints drawn over layouts, ZeRO, keys, frozen weights, groups and adapters, loaded by drawn calls."""

from __future__ import annotations

import checkpoint_loads as loads
import pytest
from checkpoint_loads import Case, Run, over
from ranks import run_on_ranks

BATCHES, IN_A_WORLD = 16, 6
OFFLOADED = {"zero": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}}
"""A layout that is not known."""
CORNERS = [
    Case("llama", Run(3, {}), Run(3, {}, {"intermediate_size": 40}), "another model"),
    Case("llama", Run(1, {}), Run(3, over(tensor=2), {"num_hidden_layers": 6}), "another model", groups=2),
    Case("llama", Run(2, {}), Run(2, {}, {"vocab_size": 128}), "another model"),
    Case("llama", Run(3, OFFLOADED), Run(3, OFFLOADED, {"num_hidden_layers": 2}), "another model"),
    Case("llama", Run(3, {}), Run(0, over(tensor=2)), "not strict", "lora"),
    Case("llama", Run(0, over(tensor=2)), Run(3, {}), "not strict", "lora", groups=2),
    Case("qwen2", Run(2, over(pipeline=2)), Run(1, over(tensor=2)), "strict, frozen left out", "mlp"),
    Case("mixtral", Run(2, over(expert=2)), Run(1, over(tensor=2)), "not strict", "mlp"),
    Case("mixtral", Run(1, over(expert=2)), Run(1, over(expert=2)), "whole", "embed_tokens"),
]


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize("batch", range(BATCHES + 1), ids=lambda index: f"drawn {index}" if index else "corners")
def test_loads(batch, tmp_path):
    cases = [loads.drawn(IN_A_WORLD * batch + index) for index in range(IN_A_WORLD)] if batch else CORNERS
    run_on_ranks(2, loads.lead, cases, str(tmp_path), deadline_s=400.0)


@pytest.mark.slow
def test_other_dtypes(tmp_path):
    run_on_ranks(2, loads.other_dtypes, str(tmp_path))
