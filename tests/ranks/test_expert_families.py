"""Each decoder of transformers that has experts, over expert ranks and expert tensor ranks: exact, or refused."""

from __future__ import annotations

import decoder_families as families
import expert_families
import pytest
from expert_families import FAMILIES
from ranks import run_on_ranks

NOT_EXPERTS = "refused: ds_npu.parallel.expert: {} has no module of experts that ds_npu knows"
CASES = [
    ("qwen2_moe", 1, "exact"),
    ("gpt_oss", 1, "exact"),
    ("gpt_oss", 2, "exact"),
    ("granitemoe", 2, "exact"),
    ("deepseek_v2", 2, "exact"),
    ("glm4_moe", 1, "exact"),
    ("olmoe", 2, "exact"),
    ("aria_text", 2, "exact"),
    ("llama4_text", 1, "exact"),
    ("llama4_text", 2, "exact"),
    (
        "longcat_flash",
        1,
        "refused: ds_npu.parallel.expert: model.layers.*.mlp.experts has weights of different numbers",
    ),
    ("jetmoe", 1, NOT_EXPERTS.format("JetMoeForCausalLM")),
    ("llama", 1, NOT_EXPERTS.format("LlamaForCausalLM")),
]
"""Families, the ranks that share an expert, and what comes of it."""
IN_FLOAT32 = {"inkling2_text": 1e-6}
"""Bounds where an activation computes in float32: these tests make it float64 in forward, nothing does in backward."""


def hold(cases: list[tuple[str, int, str]]) -> None:
    found = [(kind, etp, expert_families.outcome(kind, etp)) for kind, etp, _ in cases]
    wrong = [each for each, case in zip(found, cases, strict=True) if not each[2].startswith(case[2])]
    assert not wrong, wrong


def test_families_that_differ():
    run_on_ranks(2, hold, CASES)


@pytest.mark.parametrize("kind", ["qwen2_moe", "gpt_oss"])
def test_autocast(kind):
    run_on_ranks(2, expert_families.under_autocast, kind)


def every_axis(kind: str) -> None:
    for etp in (1, 2):
        found = expert_families.outcome(kind, etp, IN_FLOAT32.get(kind, families.EXACT))
        assert found.startswith(("exact", "refused: ", "one process")), (kind, etp, found)


def test_there_are_families():
    assert {"mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4"} <= set(FAMILIES) and len(FAMILIES) > 40


@pytest.mark.slow
@pytest.mark.matrix(drawn=1)
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family(kind):
    if not families.is_buildable(kind):
        pytest.skip("no tiny model of it can be made from the sizes that all families share")
    run_on_ranks(2, every_axis, kind, deadline_s=600.0)
