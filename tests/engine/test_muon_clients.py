"""Muon as clients use it: adapters, ``no_sync``, weights that are trained later, what is refused."""

from __future__ import annotations

import muon_clients as clients
import muon_lives as lives
import pytest
import tiny_models
import torch
from muon_rule import MuonCase
from ranks import run_on_ranks
from torch import nn

from ds_npu.parallel.runtime.placement import Placement, set_placement
from ds_npu.parallel.tensor.sharding import Sharding
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import PlannedTopology
from ds_npu.zero_ext.gradient_norm import REPLICATED
from ds_npu.zero_ext.matrix_holdings import why_not_whole

TENSOR, DATA = {"parallel": {"tensor": 2}}, {"parallel": {}}


@pytest.mark.slow
def test_adapters():
    cases = [MuonCase("llama", 0, TENSOR), MuonCase("llama", 2, DATA), MuonCase("llama", 3, TENSOR)]
    run_on_ranks(2, clients.adapters, cases)


@pytest.mark.slow
def test_no_sync():
    run_on_ranks(2, clients.no_sync, [MuonCase("llama", 0, DATA), MuonCase("llama", 1, DATA)])


@pytest.mark.slow
def test_weights_that_are_trained_later():
    run_on_ranks(2, clients.trained_later, [MuonCase("llama", 0, TENSOR), MuonCase("llama", 0, DATA)])


@pytest.mark.slow
def test_groups_that_are_added_later():
    run_on_ranks(2, clients.groups_added_later, [MuonCase("llama", 0, TENSOR), MuonCase("llama", 0, DATA)])


@pytest.mark.slow
def test_heads_of_a_model_that_is_read_in_shards(tmp_path):
    tiny_models.tiny("llama", torch.float32).save_pretrained(tmp_path)
    run_on_ranks(2, clients.sharded_heads, str(tmp_path))


def test_settings_that_are_refused():
    zenflow = {"zenflow": {"topk_ratio": 0.1, "update_interval": 2, "select_strategy": "step"}}
    cases = [(MuonCase("llama", 2, TENSOR, zero=zenflow), {}, "zero_optimization.zenflow: found")]
    run_on_ranks(2, lives.refusals, cases)


def test_weights_that_cannot_be_made_whole():
    """Tensor-parallel layers of a model's own, matrices of two stages, dims that no rectangle has."""
    topology = PlannedTopology(Degrees(tp=2, pp=2))
    twice = Sharding(0, 8, (((0, 4),), ((4, 8),)))
    cases = {
        "of a tensor-parallel layer of the model's own": (
            Placement("own.weight", (8, 8), absent=frozenset({"tp"})),
            None,
        ),
        "shared by several pipeline stages": (Placement("tied.weight", (8, 8)), False),
        "neither two dims": (Placement("x.weight", (2, 2, 2, 2, 2)), None),
        "no rectangles": (Placement("twice.weight", (8, 8), sharded={"tp": twice, "etp": twice}), None),
    }
    for said, (placement, is_replicated) in cases.items():
        weight = nn.Parameter(torch.zeros(8, 8))
        set_placement(weight, placement)
        if is_replicated is not None:
            REPLICATED.set(weight, is_replicated)
        found = why_not_whole(weight, topology)
        assert found is not None and placement.name in found and said in found and "What to do" in found
    weight = nn.Parameter(torch.zeros(4, 8))
    set_placement(weight, Placement("fine.weight", (8, 8), sharded={"tp": twice}))
    assert why_not_whole(weight, topology) is None
