"""Experts in an nn.ModuleList over ranks: the gradient rule, checkpoints, and what is refused."""

from __future__ import annotations

import itertools
from functools import partial

import listed_experts
import pytest
import torch
from ranks import run_on_ranks
from torch import nn

from ds_npu.config.moe import MoeSection
from ds_npu.features.build import Build
from ds_npu.features.driver import apply_features
from ds_npu.features.experts.expert_ranks import MOE
from ds_npu.models.plan import PlanError
from ds_npu.parallel.expert.weights import stacked
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

STAGES = (0, 1, 2, 3)
WORLDS = [
    (2, {"expert": 2}),
    (2, {"expert": 2, "tensor": 2}),
    (4, {"expert": 2, "context": 2}),
    (4, {"expert": 2}),
    (4, {"expert": 4}),
    (4, {"expert": 2, "tensor": 2, "context": 2}),
]
SHARED = [(2, {"expert_tensor": 2}), (4, {"expert": 2, "expert_tensor": 2, "tensor": 2})]
"""Worlds whose ranks share each expert; for experts without biases."""
CASES = [
    *((kind, *world) for kind, world in itertools.product(listed_experts.KINDS, WORLDS)),
    *((kind, *world) for kind, world in itertools.product(("gated", "square"), SHARED)),
]
CORNERS = [("fused", *WORLDS[0]), ("gated", *SHARED[1]), ("sequential", *WORLDS[2])]


@pytest.mark.slow
@pytest.mark.matrix(corners=len(CORNERS), drawn=1)
@pytest.mark.parametrize(("kind", "ranks", "parallel"), [*CORNERS, *(c for c in CASES if c not in CORNERS)])
def test_every_stage_of_zero(kind, ranks, parallel):
    run_on_ranks(ranks, listed_experts.step, kind, parallel, STAGES, deadline_s=300.0)


OPTIONS = [
    ("gated", {"expert": 2}, {"overlap": True, "zero_memory": "level1"}),
    ("fused", {"expert": 2}, {"capacity_factor": 0.7, "pad_to_capacity": True, "zero_memory": "level0"}),
    ("square", {"expert_tensor": 2}, {"dispatcher": "allgather", "zero_memory": "level1"}),
    ("sequential", {"expert": 2}, {"capacity_factor": 0.6, "dispatcher": "allgather"}),
    ("gated", {"expert_tensor": 2}, {"overlap": True, "capacity_factor": 0.7}),
    ("gated", {"expert": 2, "tensor": 2}, {"overlap": True, "zero_memory": "level0"}),
]


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize(("kind", "parallel", "moe"), OPTIONS)
def test_options_of_experts(kind, parallel, moe):
    run_on_ranks(2, partial(listed_experts.step, moe=moe), kind, parallel, STAGES, deadline_s=300.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gated", "sequential"])
def test_models_that_zero_init_has_partitioned(kind):
    run_on_ranks(2, partial(listed_experts.step, is_partitioned=True), kind, {"expert": 2}, (3,), deadline_s=300.0)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parallel"), [WORLDS[0], WORLDS[3]])
def test_resumed_runs_are_uninterrupted_ones(ranks, parallel, tmp_path):
    run_on_ranks(ranks, listed_experts.resumed, "gated", parallel, STAGES, str(tmp_path), deadline_s=300.0)


@pytest.mark.parametrize(("parallel", "stage"), [({"expert": 2}, 0), ({"expert": 2}, 3)])
def test_choices_are_replayed(parallel, stage):
    run_on_ranks(2, listed_experts.replayed, parallel, stage)


def refusal(model: nn.Module, globs: dict[str, str], degrees: Degrees) -> str:
    topology = Topology(degrees)
    with pytest.raises((ValueError, PlanError)) as error:
        apply_features([(MOE, MoeSection())], Build(topology, model, globs))
    return str(error.value)


def what_is_refused() -> None:
    every, one = {"experts": "experts"}, Degrees(dp=2, ep=2)

    def holding(experts: nn.Module) -> nn.Module:
        return nn.ModuleDict({"experts": experts})

    said = refusal(listed_experts.LoopsItself(), {}, one)
    assert "it has experts, a list of 4 Gated over which LoopsItself loops itself: move the loop" in said
    said = refusal(holding(listed_experts.Wrong(listed_experts.Gated)), every, one)
    assert "experts (Wrong) has the role experts, and its forward computes something else than each token's sum" in said
    said = refusal(holding(listed_experts.Loop(listed_experts.Dropping)), every, one)
    assert "Dropping computes something else than the MLPs that ds_npu knows" in said
    said = refusal(holding(listed_experts.Different()), every, one)
    assert "expert 1 in its list is made otherwise than expert 0 (Sequential)" in said
    said = refusal(holding(listed_experts.Loop(listed_experts.Fused)), every, Degrees(dp=2, etp=2))
    assert "expert_tensor: found 2; 1: the listed experts of experts have biases" in said
    three = holding(listed_experts.Loop(listed_experts.Gated))
    three["experts"].experts = three["experts"].experts[:3]
    assert "a divisor of the 3 experts of experts" in refusal(three, every, one)


def test_what_is_refused():
    run_on_ranks(2, what_is_refused)


def pieces_in(buffer: torch.Tensor, shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    lengths = [rows * columns for rows, columns in shapes]
    parts = torch.split(buffer, lengths)
    return [part.view(shape).requires_grad_() for part, shape in zip(parts, shapes, strict=True)]


def test_stacked_weights_are_views_where_they_stand_evenly():
    torch.manual_seed(0)
    # Gate, up and down of two experts, as ZeRO 1 and 2 lay them.
    every = pieces_in(torch.randn(2 * 36), [(3, 4), (3, 4), (4, 3)] * 2)
    ups, downs = [every[0], every[1], every[3], every[4]], [every[2], every[5]]
    apart = [piece.detach().clone().requires_grad_() for piece in ups]
    for pieces, is_view in ((ups, True), (downs, True), (apart, False), (ups[::-1], False)):
        found = stacked(pieces, 2)
        assert torch.equal(found, torch.cat(pieces).view(found.shape))
        assert (found.untyped_storage().data_ptr() == pieces[0].untyped_storage().data_ptr()) == is_view
        upstream = torch.randn_like(found)
        found.backward(upstream)
        right = torch.split(upstream.flatten(0, 1), [len(each) for each in pieces])
        assert all(torch.equal(piece.grad, each) for piece, each in zip(pieces, right, strict=True))
        for piece in pieces:
            piece.grad = None
