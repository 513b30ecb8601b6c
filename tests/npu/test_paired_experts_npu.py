"""``pipeline.overlap_experts`` on simulated NPUs, where autograd runs backwards on threads of its own.

``ds_npu sim --chaos SEED -- python -m pytest tests/npu/test_paired_experts_npu.py`` runs the devices' work in the odd
orders that CANN allows.
"""

from __future__ import annotations

import paired_experts
import pytest
from ranks import run_on_ranks

RECOMPUTED = {"recompute": {"layers": "all"}}
CASES = [("qwen3_moe", "1f1b", {}), ("deepseek_v3", "1f1b", RECOMPUTED), ("qwen3_moe", "dualpipe_v", RECOMPUTED)]


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize(("family", "schedule", "keys"), CASES, ids=str)
def test_no_bit_changes(family, schedule, keys):
    section = {"parallel": {"pipeline": 2, "expert": 2}, "moe": {}} | keys
    section["pipeline"] = {"schedule": schedule, "overlap_experts": True}
    changes = {"attention_dropout": 0.3} | (paired_experts.MIXED if family == "qwen3_moe" else {})
    run_on_ranks(
        4, paired_experts.hold, family, (1,), section, changes, backend="hccl", sets_device=False, deadline_s=500.0
    )
