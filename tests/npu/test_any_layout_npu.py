"""Checkpoints of simulated NPUs load at other layouts there, float32 weights and moments bit for bit."""

from __future__ import annotations

import checkpoint_loads
import layout_lives
import pytest
import torch
from checkpoint_loads import Case, Run, over
from ranks import run_on_ranks

TENSOR = {"parallel": {"tensor": 2}}
OWN = {"backend": "hccl", "sets_device": False}
LAYOUTS = [(1, {}), (2, TENSOR), (3, {}), (3, TENSOR), (1, {})]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_masters_and_moments_stay_bit_for_bit(dtype, tmp_path):
    run_on_ranks(2, layout_lives.in_16_bits, dtype, LAYOUTS, str(tmp_path), **OWN)


def test_a_bf16_model_without_zero(tmp_path):
    run_on_ranks(
        2, layout_lives.in_16_bits, torch.bfloat16, [(1, {}), (0, TENSOR), (0, {}), (1, {})], str(tmp_path), **OWN
    )


def test_other_models_and_frozen_weights(tmp_path):
    cases = [
        Case("llama", Run(3, {}), Run(3, over(tensor=2), {"num_hidden_layers": 6}), "another model"),
        Case("llama", Run(3, {}), Run(1, over(tensor=2)), "not strict", "lora"),
        Case("llama", Run(2, over(tensor=2)), Run(3, {}), "strict, frozen left out", "mlp"),
    ]
    run_on_ranks(2, checkpoint_loads.lead, cases, str(tmp_path), **OWN)
