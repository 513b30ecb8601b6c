"""Drawn configs over 4 ranks, in float64, with what is on by default on NPUs, against one process."""

from __future__ import annotations

import pytest
import torch
from drawn_configs import hold_drawn
from ranks import run_on_ranks

EACH = 3
"""Configs of a world."""


@pytest.mark.slow
@pytest.mark.matrix(corners=0, drawn=1)
@pytest.mark.parametrize("world", range(30))
def test_drawn_configs_are_one_process(world):
    numbers = tuple(range(world * EACH, (world + 1) * EACH))
    run_on_ranks(4, hold_drawn, numbers, (torch.float64,), "cpu", deadline_s=600.0)
