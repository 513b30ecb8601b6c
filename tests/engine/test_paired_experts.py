"""``pipeline.overlap_experts``: a forward beside a backward changes no bit; all ranks send in one order."""

from __future__ import annotations

import paired_experts
import pytest
from ranks import run_on_ranks


def section(schedule: str = "1f1b", keys: dict | None = None, **moe: object) -> dict:
    pipeline = {"schedule": schedule, "overlap_experts": True}
    pipeline |= {"virtual_stages": 2} if schedule == "interleaved" else {}
    return {"parallel": {"pipeline": 2, "expert": 2}, "pipeline": pipeline, "moe": moe} | (keys or {})


def with_tensor_ranks(asked: dict) -> dict:
    return asked | {"parallel": asked["parallel"] | {"tensor": 2}}


DROPOUT = paired_experts.MIXED | {"attention_dropout": 0.3}
RECOMPUTED = {"recompute": {"layers": "all"}}
CASES = [
    ("qwen3_moe", (0, 1), section(), paired_experts.MIXED),
    ("qwen3_moe", (1,), section("dualpipe_v"), DROPOUT),
    ("deepseek_v3", (0, 1), section(), {}),
    ("deepseek_v3", (2,), section(overlap=True), {}),
    ("qwen3_moe", (1,), section(keys=RECOMPUTED), DROPOUT),
    ("qwen3_moe", (1,), section("interleaved", zero_memory="level1"), paired_experts.MIXED),
    ("qwen3_moe", (0, 1), section("dualpipe_v", zero_memory="level0"), paired_experts.MIXED),
    ("qwen3_moe", (1,), section(dispatcher="allgather"), paired_experts.MIXED),
    ("qwen3_moe", (1,), section(replica_rows=1), paired_experts.MIXED),
    ("qwen3_moe", (1,), section(capacity_factor=1.0, pad_to_capacity=True), DROPOUT),
    ("qwen3_moe", (1,), section("interleaved", overlap=True), paired_experts.MIXED),
    ("qwen3_moe", (1,), section("dualpipe_v", keys=RECOMPUTED, zero_memory="level1"), DROPOUT),
    ("qwen3_moe", (0, 1), with_tensor_ranks(section()), paired_experts.MIXED),
    ("qwen3_moe", (1,), section(aux_loss={"coefficient": 0.3}, z_loss=0.1), paired_experts.MIXED),
    ("mixtral", (0, 1, 2), section("interleaved"), paired_experts.MIXED),
]


@pytest.mark.slow
@pytest.mark.matrix(corners=3, drawn=1)
@pytest.mark.parametrize(("family", "stages", "asked", "changes"), CASES, ids=str)
def test_no_bit_changes(family, stages, asked, changes):
    run_on_ranks(4, paired_experts.hold, family, stages, asked, changes, deadline_s=400.0)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe_v"])
def test_experts_without_tokens(schedule):
    run_on_ranks(4, paired_experts.hold, "qwen3_moe", (1,), section(schedule), paired_experts.MIXED, False)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "hand_overs"), [(3, 5), (0, 4)])
def test_a_dead_rank_ends_all(victim, hand_overs):
    run_on_ranks(4, paired_experts.dying, victim, hand_overs, deadline_s=150.0)
