"""The gradient rule for Hugging Face models sharded over tensor ranks: DeepSpeed's engine against one process.

The corners: every way of sharding on 2 tensor ranks, uneven sizes on 4, data ranks beside them, bf16.
"""

from __future__ import annotations

import itertools

import pytest
import tiny_models
import torch
from ranks import run_on_ranks
from tensor_parallel_rule import hold_to_one_process

STAGES = (0, 1, 2, 3)
DIFFERENT = ("llama", "gpt2", "phi3", "qwen3_moe", "deepseek_v3")
"""Families that are split in different ways."""
UNEVEN = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "hidden_size": 48,
    "intermediate_size": 50,
    "vocab_size": 61,
}
"""Sizes that 4 tensor ranks do not divide, and fewer key and value heads than ranks."""
WORLDS = itertools.product(tiny_models.FAMILIES, [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)])
"""Families, tensor and data ranks."""
CORNERS = [("deepseek_v3", (2, 2)), ("gpt2", (4, 1)), ("mixtral", (2, 1)), ("phi3", (2, 1)), ("qwen2_5_vl", (2, 1))]


def test_two_tensor_ranks():
    run_on_ranks(2, hold_to_one_process, "llama", 2, (1, 3), torch.float64, {})


@pytest.mark.slow
@pytest.mark.matrix(corners=len(CORNERS), drawn=2)
@pytest.mark.parametrize(("family", "world"), dict.fromkeys([*CORNERS, *WORLDS]), ids=str)
def test_every_stage_of_zero(family, world):
    tensor, dp = world
    run_on_ranks(tensor * dp, hold_to_one_process, family, tensor, STAGES, torch.float64, {}, deadline_s=600.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("phi3", {}), ("qwen2", {"tie_word_embeddings": True})],
    ids=str,
)
def test_sizes_that_do_not_divide(family, changes):
    run_on_ranks(4, hold_to_one_process, family, 4, (0, 3), torch.float64, UNEVEN | changes)


@pytest.mark.slow
@pytest.mark.parametrize("family", DIFFERENT)
def test_bf16_is_within_twice_the_error_of_one_process(family):
    run_on_ranks(2, hold_to_one_process, family, 2, (0, 1, 3), torch.bfloat16, {})
