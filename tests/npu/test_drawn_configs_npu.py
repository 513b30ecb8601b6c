"""Drawn configs over 4 simulated NPUs, in float32 and bf16, against one process in float64."""

from __future__ import annotations

import pytest
import torch
from drawn_configs import hold_drawn
from ranks import run_on_ranks

EACH = 2
"""Configs of a world."""


@pytest.mark.slow
@pytest.mark.matrix(corners=0, drawn=1)
@pytest.mark.parametrize("world", range(30))
def test_drawn_configs_are_one_process(world):
    numbers = tuple(range(1000 + world * EACH, 1000 + (world + 1) * EACH))
    asked = (numbers, (torch.float32, torch.bfloat16), "npu")
    run_on_ranks(4, hold_drawn, *asked, backend="hccl", sets_device=False, deadline_s=600.0)
