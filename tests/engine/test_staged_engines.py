"""Engines whose model ds_npu cuts into pipeline stages, by keys of the config alone, against one process."""

from __future__ import annotations

import pipeline_rule as rule
import pytest
from ranks import run_on_ranks

from ds_npu.parallel.pipeline.schedules import SCHEDULES

UNTIED = {"tie_word_embeddings": False}
SEQUENCES = {"tensor": 2, "sequence_parallel": True}


def section(pipeline: int, schedule: str | None = None, keys: dict | None = None, **parallel: object) -> dict:
    wanted = (keys or {}) | ({} if schedule is None else {"schedule": schedule})
    if SCHEDULES[schedule or "1f1b"].chunks is None:
        wanted["virtual_stages"] = 2
    context = {"context_parallel": {"algorithm": "ring"}} if "context" in parallel else {}
    return {"parallel": {"pipeline": pipeline, **parallel}} | ({"pipeline": wanted} if wanted else {}) | context


LORA = {"r": 2, "target_modules": ["q_proj", "down_proj"]}


def test_two_stages():
    run_on_ranks(2, rule.hold_all, "llama", (0, 1, 2), [section(2)], UNTIED)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule):
    run_on_ranks(2, rule.hold_all, "llama", (1,), [section(2, schedule)], {})


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v"])
def test_tied_weights(schedule):
    run_on_ranks(2, rule.hold_all, "gpt2", (0, 1, 2), [section(2, schedule)], {})


@pytest.mark.parametrize(
    "keys",
    [{"micro_batches": 2}, {"micro_batches": 1}, {"micro_batches": 3}, {"split": [1, 3]}, {"noop_layers": [0, 5]}],
)
def test_keys(keys):
    run_on_ranks(2, rule.hold_all, "llama", (1,), [section(2, keys=keys)], {})


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@pytest.mark.parametrize("changes", [{"adapters": LORA}, {"checkpointing": True}], ids=["adapters", "checkpointing"])
def test_models_as_people_have_them(schedule, changes):
    run_on_ranks(2, rule.hold_all, "llama", (0, 1, 2), [section(2, schedule)], changes)


AXES = {
    "tensor": {"tensor": 2},
    "sequences": SEQUENCES,
    "context": {"context": 2},
    "data": {},
}


@pytest.mark.parametrize("parallel", AXES.values(), ids=AXES)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h2", "zb_v"])
def test_with_other_axes(parallel, schedule):
    run_on_ranks(4, rule.hold_all, "llama", (0, 1, 2), [section(2, schedule, **parallel)], {})


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_with_expert_ranks(schedule):
    changes = {"output_router_logits": False}
    run_on_ranks(4, rule.hold_all, "qwen3_moe", (0, 1, 2), [section(2, schedule, expert=2)], changes)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, {"expert": 2}], ids=str)
@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"])
def test_families_that_tensor_ranks_do_not_know(family, parallel):
    changes = {"output_router_logits": False} if family == "gpt_oss" else {}
    run_on_ranks(4, rule.hold_all, family, (0, 1, 2), [section(2, "zb_v", **parallel)], changes)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
def test_losses_of_routers_in_every_stage(schedule):
    moe = {"aux_loss": {"coefficient": 0.3}, "z_loss": 0.1}
    changes = {"output_router_logits": False}
    run_on_ranks(2, rule.hold_all, "qwen3_moe", (0, 2), [section(2, schedule) | {"moe": moe}], changes)


EIGHT = [
    ("llama", {"tensor": 2, "context": 2}, {}),
    ("qwen3", {"tensor": 2, "sequence_parallel": True}, {}),
    ("qwen3_moe", {"expert": 2, "tensor": 2}, {"output_router_logits": False}),
    ("qwen3_moe", {"expert": 2, "context": 2}, {"output_router_logits": False}),
    ("gpt2", {"tensor": 2}, {}),
]
CASES = [(*case, schedule) for case in EIGHT for schedule in ("1f1b", "zb_h1", "interleaved", "zb_v")]


@pytest.mark.slow
@pytest.mark.matrix(corners=0, drawn=1)
@pytest.mark.parametrize(("family", "parallel", "changes", "schedule"), CASES, ids=str)
def test_eight_ranks(family, parallel, changes, schedule):
    run_on_ranks(8, rule.hold_all, family, (0, 1, 2), [section(2, schedule, **parallel)], changes, deadline_s=900.0)


FOUR = ("1f1b", "gpipe", "zb_h1", "zb_h2")
EIGHT_STAGES = [name for name in SCHEDULES if name not in FOUR]


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize("schedule", [*FOUR, *EIGHT_STAGES])
def test_four_ranks_of_stages(schedule):
    changes = {"num_hidden_layers": 8} if schedule in EIGHT_STAGES else {}
    run_on_ranks(4, rule.hold_all, "llama", (0, 2), [section(4, schedule)], changes, deadline_s=600.0)


@pytest.mark.slow
def test_schedules_give_the_same_bits():
    """Each adds up micro-batches in their order, whatever the cut."""
    run_on_ranks(2, rule.same_bits, "llama", [section(2, schedule) for schedule in SCHEDULES], deadline_s=600.0)
