"""What ``ds_npu check`` says of Muon."""

from __future__ import annotations

import json

import pytest
import tiny_models

from ds_npu.cli.main import main
from ds_npu.config.check import check
from ds_npu.config.problems import ConfigError
from ds_npu.operator_costs import Shape, orthogonalisation_cost
from ds_npu.parallel.runtime.placement import Placement
from ds_npu.parallel.tensor.sharding import Sharding
from ds_npu.parallel.whole_matrices.holdings import MatrixWeight
from ds_npu.planner.matrix_report import matrix_lines
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.machine import machine_named
from ds_npu.zero_ext.matrix_holdings import mark_matrices, matrix_weights

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


def test_a_model_is_marked_as_deepspeed_marks_it():
    """By hand: four matrices in each of 2 blocks of a GPT-2, and its embeddings, named otherwise; 14 of a Llama."""
    for family, params, count in (("gpt2", {}, 10), ("llama", {"per_head_muon": True}, 14)):
        model = tiny_models.tiny(family)
        mark_matrices(model, {"optimizer": {"type": "Muon", "params": params}})
        found = matrix_weights(model)
        assert len(found) == count
        heads = {each.matrix_rows for each in found}
        assert heads == ({0} if family == "gpt2" else {0, model.config.head_dim})


def test_check_counts_the_matrices_of_heads(tmp_path, capsys):
    """A Llama of 2 layers over two tensor ranks: each q, k, v by its heads, and four whole matrices a layer."""
    model = tiny_models.tiny("llama")
    model.config.save_pretrained(tmp_path)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "ds_npu": {"parallel": {"tensor": 2}},
    }
    config["optimizer"] = {"type": "Muon", "params": {"lr": 0.01, "per_head_muon": True}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    main(["check", str(tmp_path / "ds.json"), "--world-size", "2", "--model", str(tmp_path)])
    of = model.config
    count = 2 * (of.num_attention_heads + 2 * of.num_key_value_heads + 4)
    assert f"Muon: {count} whole matrices, each orthogonalised once, by one of 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["offload_optimizer", "offload_param"])
def test_offloaded_states_are_a_mistake(key):
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": MUON, "ds_npu": {}}
    config["zero_optimization"] = {"stage": 3, key: {"device": "cpu"}}
    with pytest.raises(ConfigError, match=f"{key}.device: found .cpu.*optimizer.type Muon"):
        check(json.loads(json.dumps(config)), 2)
    check(config | {"optimizer": {"type": "AdamW"}}, 2)
