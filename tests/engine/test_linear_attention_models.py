"""The gradient rule for gated delta nets and Mamba 2 over context ranks: DeepSpeed's engine against one process.

transformers computes their recurrences in a way of its own, which is the reference, in float64.
"""

from __future__ import annotations

import pytest
from ranks import run_on_ranks
from test_context_models import SECTIONS, STAGES, steps

SIZES = {"hybrid": 4, "double ring": 4}
"""Context ranks, where 2 do not show what an algorithm is."""
CORNERS = [
    ("qwen3_next", "ulysses", (0, 2)),
    ("mamba2", "ulysses", (1, 3)),
    ("qwen3_5", "ring", (0, 3)),
    ("qwen3_5", "hybrid", (2,)),
]
# Experts that no token of a rank chooses are not called, and ZeRO-3 needs all ranks to call the same modules.
CASES = [
    (family, name, STAGES[: 3 if family == "qwen3_next" else 4])
    for family in ("qwen3_next", "qwen3_5", "mamba2")
    for name in SECTIONS
]


@pytest.mark.slow
@pytest.mark.matrix(corners=len(CORNERS), drawn=1)
@pytest.mark.parametrize(("family", "name", "stages"), [*CORNERS, *CASES], ids=str)
def test_one_division_of_the_sequence_serves_both_kinds_of_attention(family, name, stages):
    context = SIZES.get(name, 2)
    section = SECTIONS[name] | {"context": context}
    run_on_ranks(context, steps, family, 1, stages, section, False, deadline_s=600.0)
