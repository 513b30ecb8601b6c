"""Weights are loaded without the optimizer's state: every stage of ZeRO, every form of memory, both calls, exact."""

from __future__ import annotations

import pytest
import weights_alone
from kept_state import Case
from ranks import run_on_ranks
from weights_alone import FORMS, loads

TENSOR = (("tensor", 2),)
EXPERT = (("expert", 2),)
CASES: dict[str, tuple[Case, Case | None]] = {
    "3": (Case(3), None),
    # DeepSpeed's optimizer for 16 bits without ZeRO decays its masters once when it is made.
    "0": (Case(0, weight_decay=0.0), None),
    "1": (Case(1), None),
    "1, accumulated in fp32": (Case(1, accumulated="fp32"), None),
    "2": (Case(2), None),
    "3, tensor": (Case(3, parallel=TENSOR), None),
    "1, expert": (Case(1, parallel=EXPERT, family="qwen3_moe"), None),
    "3, expert": (Case(3, parallel=EXPERT, family="qwen3_moe"), None),
    "3 of 1, tensor": (Case(3), Case(1, parallel=TENSOR)),
    "0, tensor of 3": (Case(0, parallel=TENSOR, weight_decay=0.0), Case(3)),
}


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize("name", CASES)
def test_a_run_begins_with_the_weights_that_were_loaded(tmp_path, name):
    case, written = CASES[name]
    is_sharded = bool(case.parallel)
    forms = tuple(form for form in FORMS if not (is_sharded and form == "int8"))
    run_on_ranks(2, loads, case, str(tmp_path), forms, written, deadline_s=600.0)


def test_partitions_without_manifests_are_refused(tmp_path):
    run_on_ranks(2, weights_alone.without_manifests, Case(3), str(tmp_path))
