"""The gradient rule with replicas of experts: DeepSpeed's engine against one process."""

from __future__ import annotations

import itertools

import pytest
from expert_rule import hold_to_one_process, replicas_are_made
from ranks import run_on_ranks

STAGES = (0, 1, 2, 3)
WORLDS = [
    (2, {"expert": 2}),
    (4, {"expert": 4}),
    (4, {"expert": 2}),
    (4, {"expert": 2, "tensor": 2, "sequence_parallel": True}),
    (4, {"expert": 2, "expert_tensor": 2, "context": 2}),
]
OPTIONS = [
    {"zero_memory": "level1"},
    {"dispatcher": "allgather"},
    {"overlap": True},
]
CASES = [(f, *w, o) for f, w, o in itertools.product(("mixtral", "deepseek_v3"), WORLDS, OPTIONS)]


def test_replicas_are_made_and_change_nothing():
    run_on_ranks(2, replicas_are_made, "qwen3_moe", {"expert": 2})


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize(("family", "ranks", "parallel", "moe"), CASES)
def test_every_stage_of_zero(family, ranks, parallel, moe):
    moe = moe | {"replica_rows": 1}
    run_on_ranks(ranks, hold_to_one_process, family, parallel, moe, STAGES, {}, deadline_s=600.0)
