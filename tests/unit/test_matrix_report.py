"""What ``ds_npu check`` says of Muon."""

from __future__ import annotations

import json

import pytest

from ds_npu.config.check import check
from ds_npu.config.problems import ConfigError
from ds_npu.config.whole_matrices import is_stepped_by_muon
from ds_npu.operator_costs import Shape, orthogonalisation_cost
from ds_npu.parallel.runtime.placement import Placement
from ds_npu.parallel.tensor.sharding import Sharding
from ds_npu.parallel.whole_matrices.holdings import MatrixWeight
from ds_npu.planner.matrix_report import matrix_lines
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.machine import machine_named

MUON = {"type": "Muon", "params": {"lr": 0.01}}


def halves(name: str, dim: int) -> MatrixWeight:
    return MatrixWeight(
        Placement(name, (1024, 1024), sharded={"tp": Sharding(dim, 1024, (((0, 512),), ((512, 1024),)))})
    )


def test_owners_seconds_and_bytes():
    machine = machine_named("A2")
    weights = [halves(f"layer{index}.weight", index % 2) for index in range(4)]
    first, owns, sends = matrix_lines(weights, Degrees(tp=2), 1, "jordan", machine)
    assert first == "Muon: 4 whole matrices, each orthogonalised once, by one of 2 ranks"
    cost = orthogonalisation_cost(Shape((2, 1024, 1024), 2), 2, (2, 3), gram=True).flop
    time = f"{1e3 * cost / machine.matmul:,.1f}"
    assert owns == f"  A rank owns 2: {time} to {time} ms of products a step, estimated for an A2"
    # Half of its two matrices in float32 comes to each rank, and half of the others' goes: 2 x 1024 x 512 elements.
    assert sends == "  A rank sends 4.0 MiB of gradients and 2.0 MiB of updates, on average"
    assert not list(matrix_lines([], Degrees(tp=2), 1, "jordan", machine))


def test_what_muon_steps_is_what_deepspeed_marks():
    import deepspeed
    import tiny_models

    model = tiny_models.tiny("gpt2")
    config = type("Config", (), {"optimizer_name": "muon", "optimizer_params": {}})
    deepspeed.set_optimizer_flags(config, model)
    found = {name: is_stepped_by_muon(name, each.dim()) for name, each in model.named_parameters()}
    assert found == {name: each.use_muon for name, each in model.named_parameters()} and len(set(found.values())) == 2


@pytest.mark.parametrize("key", ["offload_optimizer", "offload_param"])
def test_offloaded_states_are_a_mistake(key):
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": MUON, "ds_npu": {}}
    config["zero_optimization"] = {"stage": 3, key: {"device": "cpu"}}
    with pytest.raises(ConfigError, match=f"{key}.device: found .cpu.*optimizer.type Muon"):
        check(json.loads(json.dumps(config)), 2)
    check(config | {"optimizer": {"type": "AdamW"}}, 2)
