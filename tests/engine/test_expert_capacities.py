"""Experts with a capacity: the gradient rule on the same pieces, padded and not."""

from __future__ import annotations

import itertools

import pytest
from expert_capacity import hold_to_one_process
from ranks import run_on_ranks

STAGES = (0, 1, 2, 3)
WORLDS = [
    (2, {"expert": 2, "tensor": 2}),
    (2, {"expert": 2, "tensor": 2, "sequence_parallel": True}),
    (2, {"expert": 2, "context": 2}),
    (2, {"expert_tensor": 2}),
    (2, {}),
    (4, {"expert": 4}),
    (4, {"expert": 2, "expert_tensor": 2, "tensor": 2}),
]
POLICIES = [
    {"capacity_factor": 0.75, "capacity_policy": "position", "dispatcher": "allgather", "zero_memory": "level1"},
    {"capacity_factor": 0.75, "pad_to_capacity": True},
    {"capacity_factor": 0.6, "pad_to_capacity": True, "zero_memory": "level0"},
    {"capacity_factor": 0.6},
]
CASES = [
    (family, ranks, parallel, {k: v for k, v in moe.items() if parallel or k != "dispatcher"})
    for family, (ranks, parallel), moe in itertools.product(("qwen3_moe", "mixtral", "deepseek_v3"), WORLDS, POLICIES)
]
CORNERS = [
    ("qwen3_moe", *WORLDS[0], POLICIES[1]),
    ("mixtral", *WORLDS[1], POLICIES[2]),
    ("deepseek_v3", *WORLDS[2], POLICIES[0]),
    ("llama4_text", *WORLDS[0], POLICIES[1]),
    ("llama4_text", *WORLDS[3], POLICIES[0]),
]


@pytest.mark.parametrize("moe", POLICIES[1:3], ids=str)
def test_two_expert_ranks(moe):
    run_on_ranks(2, hold_to_one_process, "mixtral", {"expert": 2}, moe, (0, 3))


@pytest.mark.slow
@pytest.mark.matrix(corners=len(CORNERS), drawn=2)
@pytest.mark.parametrize(("family", "ranks", "parallel", "moe"), [*CORNERS, *(c for c in CASES if c not in CORNERS)])
def test_every_stage_of_zero(family, ranks, parallel, moe):
    run_on_ranks(ranks, hold_to_one_process, family, parallel, moe, STAGES, deadline_s=600.0)
