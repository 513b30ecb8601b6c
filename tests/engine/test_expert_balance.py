"""Losses that balance experts: the gradient rule against their formulas in one process."""

from __future__ import annotations

import itertools

import pytest
from expert_balance import adapters_get_gradients, hold_to_one_process, other_losses_are_refused
from ranks import run_on_ranks

STAGES = (0, 1, 2, 3)
WORLDS = [
    (2, {"expert": 2}),
    (2, {"expert": 2, "tensor": 2}),
    (2, {"expert": 2, "tensor": 2, "sequence_parallel": True}),
    (2, {"expert": 2, "context": 2}),
    (2, {"tensor": 2}),
    (1, {}),
    (4, {"expert": 4}),
    (4, {"expert": 2, "tensor": 2, "context": 2}),
    (4, {"expert": 2, "context": 2}),
]
LOSSES = [
    {"aux_loss": {"coefficient": 0.3}, "z_loss": 0.1},
    {"aux_loss": {"coefficient": 0.3, "over": "sequence"}},
    {"aux_loss": {"coefficient": 0.3, "over": "global_batch"}, "z_loss": 0.1},
    {"z_loss": 0.2},
]
CASES = [(f, *w, m) for f, w, m in itertools.product(("qwen3_moe", "deepseek_v3", "mixtral"), WORLDS, LOSSES)]
CORNERS = [
    ("deepseek_v3", *WORLDS[1], LOSSES[1]),
    ("mixtral", *WORLDS[2], LOSSES[0]),
    ("qwen3_moe", *WORLDS[3], LOSSES[2]),
    ("llama4_text", *WORLDS[2], LOSSES[2]),
]


@pytest.mark.parametrize("moe", LOSSES[1:3], ids=str)
def test_two_expert_ranks(moe):
    run_on_ranks(2, hold_to_one_process, "mixtral", {"expert": 2}, moe, (0, 3))


@pytest.mark.slow
@pytest.mark.matrix(corners=len(CORNERS), drawn=2)
@pytest.mark.parametrize(("family", "ranks", "parallel", "moe"), [*CORNERS, *(c for c in CASES if c not in CORNERS)])
def test_every_stage_of_zero(family, ranks, parallel, moe):
    run_on_ranks(ranks, hold_to_one_process, family, parallel, moe, STAGES, deadline_s=600.0)


@pytest.mark.slow
def test_adapters_around_a_model_over_context_ranks():
    run_on_ranks(2, adapters_get_gradients, {"expert": 2, "context": 2}, 0)


@pytest.mark.parametrize(("ranks", "parallel"), [(1, {}), (2, {"expert": 2})], ids=str)
def test_losses_that_scripts_make_themselves_are_refused(ranks, parallel):
    run_on_ranks(ranks, other_losses_are_refused, parallel)
