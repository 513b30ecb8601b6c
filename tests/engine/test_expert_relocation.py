"""Experts that move between ranks while an engine trains: only where they are changes."""

from __future__ import annotations

import itertools

import pytest
import relocation_rule as rule
from ranks import run_on_ranks

STAGES = (0, 1, 2, 3)
WORLDS = [
    (2, {"expert": 2}),
    (4, {"expert": 2}),
    (4, {"expert": 4}),
    (4, {"expert": 2, "tensor": 2, "sequence_parallel": True}),
    (4, {"expert": 2, "expert_tensor": 2, "tensor": 2}),
    (4, {"expert": 2, "context": 2}),
]
"""Ranks, and the axes; with four ranks and two of experts there are two copies of each, over which ZeRO shards them."""
OPTIONS = [
    ({}, {}),
    ({"dispatcher": "allgather"}, {"stage3_param_persistence_threshold": 100000}),
    ({"zero_memory": "level1"}, {}),
    ({"replica_rows": 1, "overlap": True}, {}),
]
"""Of "moe", and of DeepSpeed's "zero_optimization"."""
CASES = [(f, *w, *o) for f, w, o in itertools.product(rule.COUNTS, WORLDS, OPTIONS)]
CORNERS = [("qwen3_moe", *WORLDS[1], *OPTIONS[1]), ("deepseek_v3", *WORLDS[0], *OPTIONS[3])]


def test_two_expert_ranks():
    run_on_ranks(2, rule.hold_to_a_run_without, "qwen3_moe", {"expert": 2}, {}, (2,), {})


@pytest.mark.slow
@pytest.mark.matrix(corners=len(CORNERS), drawn=1)
@pytest.mark.parametrize(
    ("family", "ranks", "parallel", "moe", "zero"), [*CORNERS, *(each for each in CASES if each not in CORNERS)]
)
def test_every_stage_of_zero(family, ranks, parallel, moe, zero):
    run_on_ranks(ranks, rule.hold_to_a_run_without, family, parallel, moe, STAGES, zero, deadline_s=900.0)


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize(("ranks", "parallel"), WORLDS)
def test_a_resumed_run_is_the_uninterrupted_one(ranks, parallel, tmp_path):
    run_on_ranks(ranks, rule.resume, "mixtral", parallel, STAGES, str(tmp_path), deadline_s=900.0)


def test_checkpoints_of_moved_experts_and_of_others(tmp_path):
    run_on_ranks(2, rule.other_intervals, str(tmp_path))


@pytest.mark.parametrize(("ranks", "stages"), [(2, (0, 3)), pytest.param(4, (0, 1, 2, 3), marks=pytest.mark.slow)])
def test_only_what_moves_is_sent(ranks, stages):
    run_on_ranks(ranks, rule.count_bytes, {"expert": 2}, stages, deadline_s=600.0)


def test_what_cannot_be_moved_is_refused():
    run_on_ranks(2, rule.refused)
