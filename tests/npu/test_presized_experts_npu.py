"""``moe.row_margin`` over simulated NPUs: layers in rooms, and how often the host waits in a forward."""

from __future__ import annotations

import deepspeed
import gradient_rule as rule
import presized_experts
import pytest
import tensor_parallel_rule as dense
import tiny_models
import torch
from host_waits import HostWaits
from ranks import run_on_ranks
from test_experts_npu import step

from ds_npu.topology.degrees import Degrees

LAYERS = 3


def test_layers():
    run_on_ranks(
        2, presized_experts.check_world, Degrees(dp=2, ep=2), torch.float32, "npu", backend="hccl", sets_device=True
    )


def waits_of_a_forward() -> None:
    rule.without_extension()
    model = tiny_models.tiny("mixtral", torch.float32, num_hidden_layers=LAYERS).to(torch.bfloat16)
    section = {"parallel": {"expert": 2}, "moe": {"row_margin": presized_experts.WIDE}}
    engine = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=dense.config(1, torch.bfloat16, section)
    )[0]
    ids = dense.batches(rule.MICRO).to(engine.device)
    counted = []
    for _ in range(2):
        with HostWaits() as forward:
            loss = engine(input_ids=ids, labels=ids).loss
        with HostWaits() as backward:
            engine.backward(loss)
        assert not backward.awaited_later, backward.awaited_later
        counted.append((len(forward.awaited_later), len(forward.found)))
    # The counts of each layer, and those of the forward; then the latter alone.
    assert [each[0] for each in counted] == [LAYERS + 1, 1], counted
    assert counted[1][1] <= counted[0][1], counted


def test_the_host_waits_once_for_a_forward():
    run_on_ranks(2, waits_of_a_forward, backend="hccl", sets_device=False)


@pytest.mark.slow
@pytest.mark.parametrize("margin", [presized_experts.TIGHT, presized_experts.WIDE])
def test_a_step_that_chooses_as_float64(margin):
    moe = {"row_margin": margin, "zero_memory": "level0"}
    run_on_ranks(2, step, "mixtral", {"expert": 2}, moe, 3, True, backend="hccl", sets_device=False)
