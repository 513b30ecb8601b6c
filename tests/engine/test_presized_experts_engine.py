"""``moe.row_margin``: the gradient rule in rooms that fit, and where a forward runs again because they do not."""

from __future__ import annotations

import expert_balance
import expert_loads
import presized_experts
import pytest
from presized_experts import hold_to_one_process, plain_rule
from ranks import run_on_ranks

STAGES = (0, 1, 2, 3)
CASES = [
    ("mixtral", 2, {"expert": 2, "tensor": 2, "sequence_parallel": True}, {"overlap": True, "zero_memory": "level0"}),
    ("deepseek_v3", 2, {"expert": 2, "context": 2}, {"overlap": True, "zero_memory": "level1"}),
    ("deepseek_v3", 2, {"expert": 2, "tensor": 2}, {}),
    ("qwen3_moe", 4, {"expert": 4}, {}),
    ("mixtral", 4, {"expert": 2}, {"zero_memory": "level0"}),
    ("mixtral", 4, {"expert": 2, "tensor": 4}, {}),
    ("qwen3_moe", 4, {"expert": 2, "expert_tensor": 2, "tensor": 2}, {"overlap": True}),
]


def test_two_expert_ranks():
    run_on_ranks(2, hold_to_one_process, plain_rule, "qwen3_moe", {"expert": 2}, {}, (0, 3), deadline_s=300.0)


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize(("family", "ranks", "parallel", "moe"), CASES)
def test_every_stage_of_zero(family, ranks, parallel, moe):
    run_on_ranks(ranks, hold_to_one_process, plain_rule, family, parallel, moe, STAGES, deadline_s=900.0)


@pytest.mark.slow
@pytest.mark.parametrize("over", ["micro_batch", "global_batch"])
def test_losses_are_added_once_where_a_forward_runs_again(over):
    moe = {"aux_loss": {"coefficient": 0.3, "over": over}, "z_loss": 0.1}
    hold = expert_balance.hold_to_one_process
    run_on_ranks(2, hold_to_one_process, hold, "mixtral", {"expert": 2}, moe, (0, 3), deadline_s=600.0)


@pytest.mark.slow
def test_choices_are_counted_once_where_a_forward_runs_again():
    run_on_ranks(2, loads, deadline_s=300.0)


def loads() -> None:
    with presized_experts.counted_runs() as runs:
        expert_loads.biases_follow_the_load({"expert": 2}, 2, False, row_margin=presized_experts.TIGHT)
    assert presized_experts.TOO_SMALL in runs


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"expert": 2}, {"expert": 2, "tensor": 2}], ids=str)
def test_blocks_that_are_computed_again(parallel):
    run_on_ranks(2, presized_experts.checkpointed, "mixtral", parallel, (1, 3), deadline_s=600.0)
