"""What experts are said to send before training: against every choice that a token can make."""

from __future__ import annotations

import itertools

import pytest
import tiny_models
import torch

from ds_npu.config.moe import MoeSection
from ds_npu.features.build import Build
from ds_npu.features.experts.expert_ranks import rows_away, traffic
from ds_npu.features.modules.expert_layout import expert_layouts
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import PlannedTopology


@pytest.mark.parametrize(("experts", "choices", "ep", "etp"), [(8, 2, 4, 1), (6, 3, 3, 2), (4, 4, 2, 1), (8, 8, 8, 1)])
def test_rows_away_are_the_mean_over_all_choices_and_ranks(experts, choices, ep, etp):
    found = [
        sum(rank != me for place in {each // (experts // ep) for each in chosen} for rank in own(place, etp))
        for chosen in itertools.combinations(range(experts), choices)
        for me in range(ep * etp)
    ]
    assert rows_away(experts, choices, ep, etp) == pytest.approx(sum(found) / len(found), rel=1e-12)


def own(place: int, etp: int) -> range:
    return range(place * etp, (place + 1) * etp)


@pytest.mark.parametrize(
    ("moe", "rows"),
    [
        ({}, 5 / 6),
        ({"dispatcher": "allgather"}, 1.0),
        ({"capacity_factor": 1.5, "pad_to_capacity": True}, 1.5),
    ],
)
def test_what_is_said(moe, rows):
    model = tiny_models.tiny("mixtral", torch.float32)
    build = Build(PlannedTopology(Degrees(dp=2, ep=2)), model)
    (line,) = traffic(MoeSection(**moe), build, expert_layouts(model, build.partial_plan))
    said = f"moe: model.layers.*.mlp.experts sends a token to {rows:.2f} other ranks and back"
    assert line.startswith(said) and f": {rows * 32 * 2:,.0f} bytes each way in bfloat16" in line, line


def test_nothing_is_sent_where_each_rank_has_all():
    model = tiny_models.tiny("mixtral", torch.float32)
    build = Build(PlannedTopology(Degrees()), model)
    assert traffic(MoeSection(), build, expert_layouts(model, build.partial_plan)) == []
