"""The planned HCCL communicators of a rank, and what ``ds_npu check`` prints of them; tests/npu counts them."""

from __future__ import annotations

import json

import pytest

from ds_npu.cli.main import main
from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.planner.communicators import TRAFFIC, bucket_mib, buffer_mib, default_mib, planned_communicators
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import EXPERT_GROUPS, GROUPS

SMALL = {"reduce_bucket_size": 2**20, "allgather_bucket_size": 2**21, "stage3_prefetch_bucket_size": 1}
"""Elements, of four bytes: 8 MiB."""
DEFAULT, PAIR = 200, 20


@pytest.fixture(autouse=True)
def _default_environment(monkeypatch):
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    monkeypatch.delenv("P2P_HCCL_BUFFSIZE", raising=False)


def test_the_traffic_of_every_group_of_the_topology_is_stated():
    assert sorted(each.axes for each in TRAFFIC) == sorted([*GROUPS, *EXPERT_GROUPS])


@pytest.mark.parametrize(
    ("zero", "mib"),
    [
        (SMALL, 8),
        (dict.fromkeys(SMALL, 10), 1),
        (dict.fromkeys(SMALL, 5e8), 1908),
        ({**SMALL, "reduce_bucket_size": "auto"}, None),
        ({}, None),
        (True, None),
        (None, None),
    ],
)
def test_the_largest_bucket(zero, mib):
    assert bucket_mib({"zero_optimization": zero}) == mib


def test_a_buffer_holds_the_largest_message_of_all_axes_with_the_same_ranks(monkeypatch):
    config = {"zero_optimization": SMALL}
    grid = Degrees(pp=2, dp=2, cp=2, tp=2)
    found = {axes: buffer_mib(grid, axes, config) for axes in GROUPS}
    scalars = {("dp",): 1, ("pp",): 1, ("pp", "tp"): 1}
    assert found == {("dp", "cp"): 8, ("cp",): DEFAULT, ("tp",): DEFAULT, **scalars}
    assert buffer_mib(Degrees(dp=2, tp=2), ("dp",), config) == 8
    assert buffer_mib(Degrees(dp=2, tp=2, ep=2), ("edp",), config) == 8
    # Tokens go to experts over the ranks of the buckets.
    assert buffer_mib(Degrees(dp=2, pp=2, ep=2), ("dp", "cp"), config) == DEFAULT
    monkeypatch.setenv("HCCL_BUFFSIZE", "4")
    assert [buffer_mib(grid, axes, config) for axes in (("dp", "cp"), ("tp",), ("pp",))] == [4, 4, 1]


def names(
    degrees: Degrees, algorithm: ContextAlgorithm | None = None, in_stages: bool = True
) -> dict[str, tuple[int, int]]:
    """Name -> number and MiB of each buffer."""
    planned = planned_communicators(degrees, {}, algorithm, in_stages=in_stages)
    return {each.name: (each.count, each.mib) for each in planned}


def test_the_communicators_of_a_rank():
    assert names(Degrees()) == names(Degrees(dp=8)) == {"world": (1, DEFAULT)}
    assert names(Degrees(dp=2, tp=2)) == dict.fromkeys(("world", "data", "tensor"), (1, DEFAULT))
    assert list(names(Degrees(dp=2, cp=2, tp=2))) == ["world", "data * context", "context", "tensor"]
    grid = Degrees(dp=2, cp=2, pp=2)
    assert list(names(grid)) == ["world", "data * context", "context", "pipeline", "neighbouring stages"]
    assert list(names(grid, in_stages=False)) == [
        *("world", "data * context", "data", "context", "pipeline"),
        "neighbouring stages",
    ]
    assert list(names(Degrees(dp=4, ep=2))) == ["world", "expert data", "expert"]
    assert list(names(Degrees(dp=2, tp=2, ep=2))) == ["world", "data", "tensor"]


@pytest.mark.parametrize(("stages", "neighbours"), [(2, 1), (3, 2), (8, 2)])
def test_a_stage_has_at_most_two_neighbours(stages, neighbours):
    """With each a communicator for messages up and one for those down; DeepSpeed's pipelines have one for both."""
    grid = Degrees(pp=stages, dp=2)
    assert names(grid)["neighbouring stages"] == (2 * neighbours, PAIR)
    assert names(grid, in_stages=False)["neighbouring stages"] == (neighbours, PAIR)


def test_stages_without_communicators_of_pairs(monkeypatch):
    monkeypatch.setenv("P2P_HCCL_BUFFSIZE", "0")
    grid = Degrees(pp=4, dp=2)
    assert names(grid) == names(grid, in_stages=False) | {"stages, up and down": (2, 1)}


@pytest.mark.parametrize(
    ("algorithm", "more", "without_pairs"),
    [
        (ContextAlgorithm(ulysses=4), {}, {}),
        (ContextAlgorithm(ring=4, gather=True), {}, {}),
        (ContextAlgorithm(ring=4), {"ring, pairs": 2}, {"ring, second": 1}),
        (
            ContextAlgorithm(ring=4, window=2),
            {"ring, pairs": 2, "outer ring, pairs": 2},
            {"ring": 1, "ring, second": 1, "outer ring": 1, "outer ring, second": 1},
        ),
        (
            ContextAlgorithm(ulysses=2, ring=2),
            {"Ulysses": 1, "ring, pairs": 2},
            {"Ulysses": 1, "ring": 1, "ring, second": 1},
        ),
    ],
)
def test_the_communicators_of_a_context_algorithm(monkeypatch, algorithm, more, without_pairs):
    grid = Degrees(dp=2, cp=4)
    usual = names(grid)
    assert names(grid, algorithm) == usual | {
        name: (count, PAIR if "pairs" in name else DEFAULT) for name, count in more.items()
    }
    monkeypatch.setenv("P2P_HCCL_BUFFSIZE", "0")
    assert names(grid, algorithm) == usual | {name: (count, DEFAULT) for name, count in without_pairs.items()}


def test_an_odd_ring_has_no_second_communicator(monkeypatch):
    monkeypatch.setenv("P2P_HCCL_BUFFSIZE", "0")
    assert names(Degrees(cp=3, dp=2), ContextAlgorithm(ring=3)) == names(Degrees(cp=3, dp=2))


def test_what_is_no_number_leaves_the_default(monkeypatch):
    monkeypatch.setenv("HCCL_BUFFSIZE", "many")
    assert default_mib("HCCL_BUFFSIZE") == DEFAULT


def test_check_prints_the_table(tmp_path, capsys):
    path, model = tmp_path / "ds_config.json", tmp_path / "config.json"
    section = {"parallel": {"tensor": 2, "context": 2}}
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": SMALL, "ds_npu": section}))
    model.write_text(json.dumps({"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}))
    command = ["check", str(path), "--world-size", "8"]
    assert main(command) == 0
    short = capsys.readouterr().out
    assert "The context algorithm is chosen with the first batch; its communicators come on top" in short
    assert main([*command, "--model", str(model), "--sequence-length", "8192"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    start = lines.index("HCCL communicators of each rank, each with two buffers of device memory")
    assert lines[start + 1 : start + 8] == [
        "group number MiB messages",
        "world 1 400 barriers, checkpoints",
        "data * context 1 16 buckets of gradients and weights (8 MiB)",
        "context 1 400 shares of sequences and losses",
        "tensor 1 400 hidden states (128 MiB)",
        "ring, pairs 2 80 keys and values",
        "all 6 1,296",
    ]
