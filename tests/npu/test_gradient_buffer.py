"""Weight gradients added to DeepSpeed's buffers on an NPU, by the kernel that does both in one."""

from __future__ import annotations

import gradient_buffer as rig
import gradient_rule as rule
import pytest
import torch
from gradient_buffer import Case
from ranks import run_on_ranks

USES = 5
"""Of linears in the model: up, down, head, and one that is used twice."""
KERNEL = "npu::npu_grouped_matmul_add_"
ROADS = {
    "BF16_Optimizer": Case(1, torch.bfloat16, "fp32"),
    "BF16_Optimizer, immediate": Case(1, torch.bfloat16, "fp32", more={"bf16": {"immediate_grad_update": True}}),
    # Else DeepSpeed casts gradients to fp16 for the reduction.
    "ZeRO 1, fp16, float32 gradients": Case(1, torch.float16, "fp32", more={"communication_data_type": "fp32"}),
    "no ZeRO, autocast": Case(0, torch.float32, autocast=True),
    "ZeRO 1, autocast": Case(1, torch.float32, autocast=True),
    "no ZeRO, bf16": Case(0, torch.bfloat16),
    "no ZeRO, fp16": Case(0, torch.float16),
    "ZeRO 1, float32": Case(1, torch.float32),
}


def train(*cases: Case) -> None:
    """Held to one process in float64, within twice what the same training in PyTorch's own low precision is off."""
    for case in cases:
        watched: list[rig.Allocations] = []

        def watch(engine, watched=watched) -> rig.Allocations:
            sizes = {weight.numel() for weight in (engine.module.up.weight, engine.module.twice.weight)}
            watched.append(rig.Allocations(sizes))
            return watched[-1]

        expected = rig.plain(case, 1)
        ordinary, direct = rig.train(case, direct=False), rig.train(case, True, watch)
        bound = 2 * max(rule.relative(ordinary.gradients, expected.gradients), 1e-6)
        assert rule.relative(direct.gradients, expected.gradients) <= bound, case
        assert abs(direct.norm / expected.norm - 1) <= bound, case
        bound = 2 * max(rule.relative(ordinary.weights, expected.weights), 1e-6)
        assert rule.relative(direct.weights, expected.weights) <= bound, case
        float32_buffer = case.accumulated == "fp32" or case.autocast
        assert len(watched) == rig.STEPS * rule.ACCUMULATION
        for index, each in enumerate(watched):
            assert each.calls[KERNEL] == (USES if float32_buffer else 0), (case, index, each.calls)
            if index % rule.ACCUMULATION:
                # The first micro-batch of a step makes the buffer where DeepSpeed drops it after a step.
                assert each.found == [], (case, index, each.found)


def test_a_step_calls_the_kernel_for_every_linear():
    run_on_ranks(1, train, *ROADS.values(), backend="hccl", sets_device=False)


ON_TWO = {
    "BF16_Optimizer": ROADS["BF16_Optimizer"],
    "buckets of ZeRO 1": Case(1, torch.bfloat16),
    "buckets of ZeRO 2": Case(2, torch.bfloat16),
    # Sums are divided before they are sent: they could pass the range of fp16.
    "buckets of ZeRO 2, fp16": Case(2, torch.float16),
    "buckets of ZeRO 2, float32": Case(2, torch.float32),
}


def train_on_two(*cases: Case) -> None:
    for case in cases:
        expected = rig.plain(case, 2)
        ordinary, direct = rig.train(case, direct=False), rig.train(case, direct=True)
        for found, other, true in (
            (direct.gradients, ordinary.gradients, expected.gradients),
            (direct.weights, ordinary.weights, expected.weights),
        ):
            assert rule.relative(found, true) <= 2 * max(rule.relative(other, true), 1e-6), case


@pytest.mark.slow
def test_two_ranks():
    run_on_ranks(2, train_on_two, *ON_TWO.values(), backend="hccl", sets_device=False)
