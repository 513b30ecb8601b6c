"""Experts in an nn.ModuleList on simulated NPUs: steps in bf16 that choose as float64, against one process."""

from __future__ import annotations

import gradient_rule as rule
import listed_experts
import pytest
import torch
from listed_experts import Case, ListNet
from ranks import run_on_ranks
from test_experts_npu import OF_EXPERTS, count_kernels

from ds_npu.parallel import RoutingRecord, record_routing, replay_routing


def rounded(kind: str) -> torch.nn.Module:
    """A model whose weights are those of the engine's, in bf16."""
    return ListNet(kind).to(torch.bfloat16)


def step(kind: str, parallel: dict, moe: dict, stage: int) -> None:
    """Gradients within twice the error of one process."""
    rule.without_extension()
    called = count_kernels()
    engine, model = listed_experts.started(Case(kind, parallel, moe, torch.bfloat16), stage)
    topology, count = engine.topology, rule.MICRO * rule.ACCUMULATION * engine.topology.size("dp")
    with record_routing(plain := rounded(kind).double(), ["moe"]) as record, torch.no_grad():
        plain(rule.samples(count)[:, :-1])
    expected = rule.reference(count, rounded(kind))
    with replay_routing(narrow := rounded(kind), record):
        single = rule.reference(count, narrow, torch.bfloat16)
    bound = 2 * rule.relative(single.gradients, expected.gradients)
    # [ACCUMULATION, dp, tokens of a micro-batch, k].
    chosen = record.choices["moe"][0].view(rule.ACCUMULATION, topology.size("dp"), rule.MICRO * rule.S, -1)
    mine = RoutingRecord({"moe": list(chosen[:, topology.rank("dp")])})
    with replay_routing(engine.module, mine):
        for index, (inputs, labels) in enumerate(rule.my_batches(topology)):
            loss = rule.token_loss(engine(inputs.to(engine.device)), labels.to(engine.device))
            engine.backward(loss)
            if index == rule.ACCUMULATION - 1:
                gradients = rule.reduced_gradients(engine, model)
            engine.step()
    error = rule.relative(listed_experts.whole(model, gradients, topology), expected.gradients)
    assert error <= bound, (kind, parallel, moe, stage, error, bound)
    assert called >= OF_EXPERTS, called


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "parallel", "moe", "stage"),
    [
        ("gated", {"expert": 2}, {"overlap": True}, 2),
        ("sequential", {"expert": 2}, {"zero_memory": "level1"}, 3),
        ("square", {"expert_tensor": 2}, {"dispatcher": "allgather"}, 0),
        ("fused", {"expert": 2}, {"capacity_factor": 4.0, "pad_to_capacity": True}, 1),
    ],
)
def test_a_step(kind, parallel, moe, stage):
    run_on_ranks(2, step, kind, parallel, moe, stage, backend="hccl", sets_device=False)
