"""Every layout's checkpoint goes on at every other layout, with every optimizer, against one process."""

from __future__ import annotations

import layout_pairs as lives
import matrix
import pytest
from ranks import run_on_ranks

DRAWN = 3
"""Pairs of a kind that a run takes, beside one corner."""


def taken(name: str, ranks: int) -> list[tuple[int, int]]:
    pairs = lives.pairs_of(lives.KINDS[name], ranks)
    return pairs if matrix.is_exhaustive() else matrix.chosen(f"pairs {name} {ranks}", pairs, 1, DRAWN)


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize("name", lives.KINDS)
def test_pairs_of_layouts(name, tmp_path):
    run_on_ranks(4, lives.hold, lives.KINDS[name], taken(name, 4), str(tmp_path), deadline_s=1800.0)


@pytest.mark.slow
@pytest.mark.matrix(corners=0, drawn=1)
@pytest.mark.parametrize("name", lives.KINDS)
def test_pairs_of_layouts_of_eight_ranks(name, tmp_path):
    run_on_ranks(8, lives.hold, lives.KINDS[name], taken(name, 8), str(tmp_path), deadline_s=900.0)
