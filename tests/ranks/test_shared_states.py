"""Mamba 2 with fewer groups of heads than tensor ranks, and other linear attention over them: against one process."""

from __future__ import annotations

import decoder_families as families
import pytest
from ranks import run_on_ranks

pytestmark = pytest.mark.slow

GROUPS = {"mamba2": "n_groups", "bamba": "mamba_n_groups", "falcon_h1": "mamba_n_groups", "nemotron_h": "n_groups"}
CASES = [
    ("mamba2", 2, 4, False, {}),
    ("bamba", 1, 2, True, {}),
    ("falcon_h1", 1, 2, False, {}),
    ("falcon_h1", 2, 2, False, {"mamba_rms_norm": True}),
    ("nemotron_h", 2, 4, True, {}),
    ("mamba2", 1, 4, True, {}),
    ("nemotron_h", 4, 2, False, {}),
]
"""Families, their groups, tensor ranks, sequence parallelism, and further settings."""


def exact(kind: str, groups: int, tensor: int, sequence_parallel: bool, further: dict[str, object]) -> None:
    families.CHANGES[kind] = dict(families.CHANGES.get(kind, {})) | {GROUPS[kind]: groups} | further
    assert families.outcome(kind, tensor, sequence_parallel) == "exact"


@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize(("kind", "groups", "tensor", "sequence_parallel", "further"), CASES)
def test_groups_that_ranks_share(kind, groups, tensor, sequence_parallel, further):
    run_on_ranks(tensor, exact, kind, groups, tensor, sequence_parallel, further)


def refused(kind: str, further: dict[str, object], why: str) -> None:
    families.CHANGES[kind] = families.CHANGES[kind] | further
    found = families.outcome(kind, 2, False)
    assert found.startswith("refused") and why in found, found


@pytest.mark.parametrize(
    ("kind", "further", "why"),
    [
        ("falcon_h1", {"mamba_rms_norm": True}, "its norm (FalconH1RMSNormGated)"),
        ("bamba", {"mamba_n_heads": 1, "mamba_d_head": 64}, "1 groups of 1 heads"),
    ],
)
def test_what_ranks_cannot_share_is_named(kind, further, why):
    run_on_ranks(2, refused, kind, further, why)
