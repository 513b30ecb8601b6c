"""The gradient rule for Hugging Face models with experts over ranks: DeepSpeed's engine against one process."""

from __future__ import annotations

import itertools

import expert_adapters
import expert_lives
import pytest
from expert_rule import hold_to_one_process, sinks_take_products
from ranks import run_on_ranks

STAGES = (0, 1, 2, 3)
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")
WORLDS = [
    (2, {"expert": 2}),
    (2, {"expert_tensor": 2}),
    (2, {"expert": 2, "tensor": 2}),
    (2, {"expert_tensor": 2, "tensor": 2, "sequence_parallel": True}),
    (2, {"expert": 2, "tensor": 2, "sequence_parallel": True}),
    (2, {"expert": 2, "context": 2}),
    (4, {"expert": 4}),
    (4, {"expert": 2}),
    (4, {"expert": 2, "expert_tensor": 2, "tensor": 2}),
    (4, {"expert": 4, "tensor": 2, "sequence_parallel": True}),
    (4, {"expert": 2, "tensor": 2, "context": 2}),
    (4, {"expert": 2, "expert_tensor": 2, "context": 2}),
]
"""Ranks, and the axes."""
OPTIONS = [
    {"dispatcher": dispatcher, "zero_memory": level}
    for dispatcher in ("alltoall", "allgather")
    for level in ("none", "level0", "level1")
] + [{"overlap": True, "zero_memory": "level0"}, {"overlap": True, "dispatcher": "allgather"}]
CASES = [(f, *w, o) for f, w, o in itertools.product(FAMILIES, WORLDS, OPTIONS)]
CORNERS = [
    ("mixtral", *WORLDS[4], OPTIONS[2]),
    ("deepseek_v3", *WORLDS[2], OPTIONS[0]),
    ("qwen3_moe", *WORLDS[5], OPTIONS[4]),
    ("deepseek_v3", *WORLDS[4], OPTIONS[6]),
]


def test_two_expert_ranks():
    run_on_ranks(2, hold_to_one_process, "qwen3_moe", {"expert": 2}, {}, (0, 3), {})


@pytest.mark.slow
@pytest.mark.matrix(corners=len(CORNERS), drawn=2)
@pytest.mark.parametrize(("family", "ranks", "parallel", "moe"), [*CORNERS, *(c for c in CASES if c not in CORNERS)])
def test_every_stage_of_zero(family, ranks, parallel, moe):
    run_on_ranks(ranks, hold_to_one_process, family, parallel, moe, STAGES, {}, deadline_s=600.0)


@pytest.mark.slow
@pytest.mark.matrix(drawn=1)
@pytest.mark.parametrize(
    ("family", "parallel", "moe"),
    [
        ("qwen3_moe", {"expert": 2, "expert_tensor": 2}, {"zero_memory": "level0"}),
        ("mixtral", {"expert": 4, "context": 2}, {}),
        ("deepseek_v3", {"expert": 4, "expert_tensor": 2, "tensor": 2, "sequence_parallel": True}, {"overlap": True}),
    ],
)
def test_eight_ranks(family, parallel, moe):
    run_on_ranks(8, hold_to_one_process, family, parallel, moe, (0, 2, 3), {}, deadline_s=900.0)


OF_EXPERTS = [
    ("llama4_text", {"expert": 2}, {"zero_memory": "level0", "overlap": True}),
    ("llama4_text", {"expert_tensor": 2}, {"dispatcher": "allgather"}),
    ("llama4_text", {"expert": 2, "tensor": 2, "sequence_parallel": True}, {}),
    ("llama4_text", {"expert": 2, "tensor": 2}, {"replica_rows": 1}),
    ("gpt_oss", {"expert_tensor": 2}, {"zero_memory": "level1"}),
    ("gpt_oss", {"expert": 2}, {"replica_rows": 1}),
]
"""Families whose experts tensor ranks do not shard."""


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize(("family", "parallel", "moe"), OF_EXPERTS)
def test_families_of_expert_ranks(family, parallel, moe):
    run_on_ranks(2, hold_to_one_process, family, parallel, moe, STAGES, {}, deadline_s=600.0)


LIVES = [
    ("llama4_text", 2, {"expert": 2, "tensor": 2}, {"expert_tensor": 2}),
    ("gpt_oss", 2, {"expert_tensor": 2}, {"expert": 2}),
    ("qwen3_moe", 2, {"expert": 2}, {"expert_tensor": 2}),
    ("mixtral", 2, {"expert": 2, "tensor": 2, "sequence_parallel": True}, {"expert": 2}),
    ("deepseek_v3", 4, {"expert": 2, "expert_tensor": 2, "tensor": 2}, {"expert": 4}),
    ("mixtral", 4, {"expert": 2}, {"expert": 4, "tensor": 2}),
]


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize(("family", "ranks", "parallel", "other"), LIVES)
def test_resumed_runs_are_uninterrupted_ones(family, ranks, parallel, other, tmp_path):
    run_on_ranks(ranks, expert_lives.resume, family, parallel, STAGES, str(tmp_path), deadline_s=600.0)


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize(("family", "ranks", "parallel", "other"), LIVES)
def test_weights_leave_and_come_back_at_other_sizes(family, ranks, parallel, other, tmp_path):
    run_on_ranks(ranks, expert_lives.export, family, parallel, other, STAGES, str(tmp_path), deadline_s=600.0)


def test_a_checkpoint_of_other_expert_ranks_without_manifests_is_refused(tmp_path):
    run_on_ranks(2, expert_lives.without_manifests, str(tmp_path))


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize(
    ("family", "ranks", "parallel", "other", "interval"),
    [
        ("mixtral", 2, {"expert": 2}, {"expert_tensor": 2}, 0),
        ("gpt_oss", 2, {"expert_tensor": 2}, {"expert": 2}, 0),
        ("qwen3_moe", 2, {"expert": 2}, {"expert_tensor": 2}, 1),
        ("mixtral", 4, {"expert": 4}, {"expert": 2}, 1),
        ("llama4_text", 4, {"expert": 2, "expert_tensor": 2}, {"expert": 4}, 0),
    ],
)
def test_experts_resume_on_other_ranks_without_zero(family, ranks, parallel, other, interval, tmp_path):
    run_on_ranks(ranks, expert_lives.reshaped, family, parallel, other, interval, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "ranks", "parallel"),
    [
        ("mixtral", 2, {"expert": 2}),
        ("llama4_text", 2, {"expert": 2}),
        ("mixtral", 4, {"expert": 2, "expert_tensor": 2, "tensor": 2}),
    ],
)
def test_models_made_under_zero_init_train_as_whole_ones(family, ranks, parallel, tmp_path):
    run_on_ranks(ranks, expert_lives.made_under_zero_init, family, parallel, str(tmp_path))


ADAPTED = [
    ("qwen3_moe", 2, {"expert_tensor": 2, "tensor": 2, "sequence_parallel": True}, {}),
    ("mixtral", 2, {"expert": 2}, {"replica_rows": 1}),
    ("mixtral", 2, {"expert": 2, "tensor": 2}, {}),
    ("llama4_text", 2, {"expert_tensor": 2}, {}),
    ("gpt_oss", 2, {"expert_tensor": 2}, {"zero_memory": "level1"}),
    ("gpt_oss", 4, {"expert": 4}, {}),
    ("mixtral", 4, {"expert": 2, "expert_tensor": 2}, {"dispatcher": "allgather"}),
]


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize(("family", "ranks", "parallel", "moe"), ADAPTED)
def test_adapters_of_experts(family, ranks, parallel, moe, tmp_path):
    section = {"parallel": parallel, "moe": moe}
    run_on_ranks(ranks, expert_adapters.step, family, section, STAGES, str(tmp_path), deadline_s=300.0)


def test_adapters_that_cannot_be_sharded_are_refused():
    run_on_ranks(2, expert_adapters.refused)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "level"), [("mixtral", "none"), ("qwen3_moe", "level1")])
def test_weight_gradients_are_added_in_the_optimizers_buffers(family, level):
    run_on_ranks(2, sinks_take_products, family, {"zero_memory": level})


def test_ranks_generate_together():
    run_on_ranks(2, expert_lives.generates, {"expert": 2}, 0)


def test_other_code_does_not_take_a_shard_for_all_experts(tmp_path):
    run_on_ranks(2, expert_lives.guarded, str(tmp_path))


def test_the_recovery_script_puts_shards_together(tmp_path):
    run_on_ranks(2, expert_lives.recovery_script, str(tmp_path))
