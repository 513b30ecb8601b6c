"""The gradient rule for Hugging Face models split over tensor ranks: DeepSpeed's engine against one process.

The corners: every way of sharding on 2 tensor ranks, uneven sizes on 4, data ranks beside them, bf16.
"""

from __future__ import annotations

import itertools

import gradient_rule as rule
import pytest
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_on_ranks

EXACT = 1e-12
SINGLE = 1e-6
"""ZeRO keeps its masters, and most of its norms, in float32, whatever the model."""
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


def steps(family: str, tensor: int, stages: tuple[int, ...], dtype: torch.dtype, changes: dict[str, object]) -> None:
    """Hold every stage, with and without sequence parallelism, to one process."""
    rule.without_extension()
    dp = dist.get_world_size() // tensor
    expected = tensor_rule.reference(family, dp, dtype=torch.float64, start=dtype, **changes)
    bound = None
    if dtype == torch.bfloat16:
        single = tensor_rule.reference(family, dp, dtype=dtype, start=dtype, **changes)
        bound = 2 * rule.relative(single.gradients, expected.gradients)
    for sequence_parallel in (False, True) if tensor > 1 else (False,):
        section = {"parallel": {"tensor": tensor, "sequence_parallel": sequence_parallel}}
        for stage in stages:
            errors = tensor_rule.engine_step(family, stage, dtype, section, expected, **changes)
            where = (family, tensor, sequence_parallel, stage, errors, bound)
            if bound is not None:
                assert max(errors.gradient, errors.norm) <= bound and errors.loss <= 4e-3, where
                continue
            assert errors.loss <= EXACT and errors.gradient <= EXACT, where
            loose = EXACT if stage == 0 else SINGLE
            assert errors.norm <= loose and errors.weight <= loose, where


WORLDS = itertools.product(tiny_models.FAMILIES, [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)])
"""Families, tensor and data ranks."""
CORNERS = [("deepseek_v3", (2, 2)), ("gpt2", (4, 1)), ("mixtral", (2, 1)), ("phi3", (2, 1)), ("qwen2_5_vl", (2, 1))]


def test_two_tensor_ranks():
    run_on_ranks(2, steps, "llama", 2, (1, 3), torch.float64, {})


@pytest.mark.slow
@pytest.mark.matrix(corners=len(CORNERS), drawn=2)
@pytest.mark.parametrize(("family", "world"), dict.fromkeys([*CORNERS, *WORLDS]), ids=str)
def test_every_stage_of_zero(family, world):
    tensor, dp = world
    run_on_ranks(tensor * dp, steps, family, tensor, STAGES, torch.float64, {}, deadline_s=600.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("phi3", {}), ("qwen2", {"tie_word_embeddings": True})],
    ids=str,
)
def test_sizes_that_do_not_divide(family, changes):
    run_on_ranks(4, steps, family, 4, (0, 3), torch.float64, UNEVEN | changes)


@pytest.mark.slow
@pytest.mark.parametrize("family", DIFFERENT)
def test_bf16_is_within_twice_the_error_of_one_process(family):
    run_on_ranks(2, steps, family, 2, (1, 3), torch.bfloat16, {})
