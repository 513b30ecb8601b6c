"""Layers of experts in buffers of known sizes, against the loop over experts in one process."""

from __future__ import annotations

import presized_experts
import pytest
from ranks import run_on_ranks

from ds_npu.topology.degrees import Degrees

WORLDS = [
    Degrees(dp=2, ep=2),
    Degrees(tp=2, etp=2),
    Degrees(tp=2, ep=2),
    Degrees(dp=4, ep=4),
    Degrees(dp=2, tp=2, ep=2, etp=2),
]


@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize(
    "degrees",
    [pytest.param(each, id=f"{each}", marks=() if each.world_size < 4 else pytest.mark.slow) for each in WORLDS],
)
def test_layers_in_rooms_compute_as_the_loop_in_one_process(degrees):
    run_on_ranks(degrees.world_size, presized_experts.check_world, degrees)
