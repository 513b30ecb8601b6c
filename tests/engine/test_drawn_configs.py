"""Drawn configs over 4 ranks, in float64, with what is on by default on NPUs, against one process."""

from __future__ import annotations

import pytest
import torch
from drawn_configs import hold_all, hold_drawn, stages_by_axes
from ranks import run_on_ranks

EACH = 3
"""Configs of a world."""


@pytest.mark.slow
@pytest.mark.matrix(corners=0, drawn=1)
@pytest.mark.parametrize("world", range(30))
def test_drawn_configs_are_one_process(world):
    numbers = tuple(range(world * EACH, (world + 1) * EACH))
    run_on_ranks(4, hold_drawn, numbers, (torch.float64,), "cpu", deadline_s=600.0)


STAGES_BY_AXES = stages_by_axes()


@pytest.mark.slow
@pytest.mark.matrix(corners=0, drawn=1)
@pytest.mark.parametrize("first", range(0, len(STAGES_BY_AXES), EACH))
def test_each_stage_of_zero_over_each_axis_is_one_process(first):
    run_on_ranks(4, hold_all, tuple(STAGES_BY_AXES[first : first + EACH]), "cpu", deadline_s=600.0)
