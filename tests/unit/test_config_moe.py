"""Mistakes in ``ds_npu.moe``: where, what was found, and what would do."""

from __future__ import annotations

import pytest

from ds_npu.config.check import check
from ds_npu.config.problems import ConfigError

ONLY = "only with ds_npu.moe.capacity_factor"
MISTAKES = [
    ({}, {"capacity_factor": 0}, "capacity_factor", "a number > 0"),
    ({}, {"capacity_factor": -1.5}, "capacity_factor", "a number > 0"),
    ({}, {"capacity_factor": 1e400}, "capacity_factor", "a number > 0"),
    ({}, {"pad_to_capacity": True}, "pad_to_capacity", ONLY),
    ({}, {"capacity_policy": "position"}, "capacity_policy", ONLY),
    ({"tensor": 2}, {"capacity_factor": 1}, "capacity_factor", "only with ds_npu.parallel.expert or expert_tensor > 1"),
    ({}, {"z_loss": -0.1}, "z_loss", "a number > 0"),
    ({}, {"bias_update_rate": 0}, "bias_update_rate", "a number > 0"),
    ({}, {"load_report": "load.png"}, "load_report", "the name of an SVG file, which ends in .svg"),
    (
        {"expert": 2},
        {"capacity_factor": 1, "pad_to_capacity": True, "dispatcher": "allgather"},
        "dispatcher",
        "'alltoall' or left out with ds_npu.moe.pad_to_capacity",
    ),
    (
        {"expert": 2},
        {"capacity_factor": 1, "pad_to_capacity": True, "replica_rows": 100},
        "replica_rows",
        "0 with ds_npu.moe.pad_to_capacity",
    ),
    ({}, {"row_margin": 1.5}, "row_margin", "only with ds_npu.parallel.expert > 1"),
    ({"expert": 2}, {"row_margin": 0.9}, "row_margin", "a number >= 1"),
    ({"expert": 2}, {"row_margin": 1.5, "dispatcher": "allgather"}, "row_margin", "dispatcher 'allgather'"),
    ({"expert": 2}, {"row_margin": 1.5, "replica_rows": 9}, "row_margin", "left out with ds_npu.moe.replica_rows 9"),
    ({"expert": 2}, {"row_margin": 1.5, "placement_interval": 9}, "row_margin", "ds_npu.moe.placement_interval 9"),
    ({"expert": 2, "pipeline": 2}, {"row_margin": 1.5}, "row_margin", "left out with ds_npu.parallel.pipeline 2"),
    ({"expert": 8}, {"dispatcher": "fused", "overlap": True}, "overlap", "false with ds_npu.moe.dispatcher 'fused'"),
    ({"expert": 8}, {"dispatcher": "fused", "zero_memory": "level0"}, "zero_memory", "'none' with ds_npu.moe.dispat"),
    ({"expert": 8}, {"dispatcher": "fused", "replica_rows": 5}, "replica_rows", "0 with ds_npu.moe.dispatcher 'fused'"),
]


@pytest.mark.parametrize(("parallel", "moe", "key", "accepted"), MISTAKES)
def test_a_mistake_says_where_what_and_what_would_do(parallel, moe, key, accepted):
    config = {"train_micro_batch_size_per_gpu": 1, "ds_npu": {"parallel": parallel, "moe": moe}}
    with pytest.raises(ConfigError) as caught:
        check(config, 8)
    mine = [each for each in caught.value.problems if each.path == f"ds_npu.moe.{key}"]
    assert len(mine) == 1 and accepted in mine[0].accepted and mine[0].found == moe[key], caught.value


def test_where_nothing_is_balanced_there_is_no_over():
    with pytest.raises(ConfigError, match=r"aux_loss.over: found \"sequence\"; only with ds_npu.moe.aux_loss.coeff"):
        check({"train_micro_batch_size_per_gpu": 1, "ds_npu": {"moe": {"aux_loss": {"over": "sequence"}}}}, 8)


def test_capacity_with_expert_ranks_is_accepted():
    moe = {"capacity_factor": 1, "pad_to_capacity": True, "capacity_policy": "position"}
    check({"train_micro_batch_size_per_gpu": 1, "ds_npu": {"parallel": {"expert": 2, "tensor": 2}, "moe": moe}}, 8)
