"""The planned HCCL communicators of a rank, and what ``ds_npu check`` prints of them; tests/npu counts them."""

from __future__ import annotations

import json

import pytest

from ds_npu.cli.main import main
from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.config.context_parallel import ContextParallelSection
from ds_npu.config.hccl import HcclSection, wrong_names
from ds_npu.config.hccl_groups import TRAFFIC
from ds_npu.planner.communicators import CommunicatorPlan, MessageSizes, bucket_mib, default_mib
from ds_npu.topology.degrees import Degrees, box_of, box_ranks
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


def buffers(grid: Degrees, config: dict, sizes: MessageSizes, *groups: tuple[str, ...]) -> list[int]:
    plan = CommunicatorPlan(grid, config, sizes=sizes)
    return [plan.buffer_mib(grid.box(*axes)) for axes in groups]


UNKNOWN = MessageSizes()


def test_a_buffer_holds_the_largest_message_of_all_axes_with_the_same_ranks(monkeypatch):
    config = {"zero_optimization": SMALL}
    grid = Degrees(pp=2, dp=2, cp=2, tp=2)
    found = dict(zip(GROUPS, buffers(grid, config, UNKNOWN, *GROUPS), strict=True))
    scalars = {("dp",): 1, ("pp",): 1, ("pp", "tp"): 1}
    assert found == {("dp", "cp"): 8, ("cp",): DEFAULT, ("tp",): DEFAULT, **scalars}
    assert buffers(Degrees(dp=2, tp=2), config, UNKNOWN, ("dp",)) == [8]
    assert buffers(Degrees(dp=2, tp=2, ep=2), config, UNKNOWN, ("edp",)) == [8]
    # Tokens go to experts over the ranks of the buckets.
    assert buffers(Degrees(dp=2, pp=2, ep=2), config, UNKNOWN, ("dp", "cp")) == [DEFAULT]
    monkeypatch.setenv("HCCL_BUFFSIZE", "4")
    assert buffers(grid, config, UNKNOWN, ("dp", "cp"), ("tp",), ("pp",)) == [4, 4, 1]


def test_hidden_states_and_tokens_take_what_the_positions_of_the_model_allow():
    model = {"hidden_size": 4096, "max_position_embeddings": 8192, "num_experts_per_tok": 2}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": SMALL}
    # 8,192 tokens of 4,096 numbers of 2 bytes; a context rank has half of them.
    assert MessageSizes.of(config, Degrees(tp=2), model) == MessageSizes(64, 128)
    assert MessageSizes.of(config, Degrees(tp=2, cp=2), model) == MessageSizes(32, 64)
    assert MessageSizes.of(config, Degrees(tp=2), {**model, "num_experts_per_tok": None}) == MessageSizes(64)
    assert MessageSizes.of(config | {"bf16": {}}, Degrees(tp=2), model) == MessageSizes(128, 256)
    for unknown in ({**model, "max_position_embeddings": None}, {}):
        assert MessageSizes.of(config, Degrees(tp=2), unknown) == UNKNOWN
    assert MessageSizes.of(config | {"train_micro_batch_size_per_gpu": "auto"}, Degrees(tp=2), model) == UNKNOWN
    grid = Degrees(dp=4, tp=2, ep=2)
    assert buffers(grid, config, MessageSizes(64, 128), ("tp",)) == [128]  # Experts are on the ranks of tp.
    assert buffers(Degrees(dp=2, tp=2), config, MessageSizes(64, 128), ("tp",), ("dp",)) == [64, 8]
    assert buffers(Degrees(dp=2, tp=2), config, MessageSizes(640), ("tp",)) == [DEFAULT]


def test_what_is_set_takes_the_place_of_the_planned_size_and_is_counted():
    hccl = HcclSection(buffer_mib={"tensor": 300, "world": 50}, op_expansion_mode={"data": "aiv"})
    plan = CommunicatorPlan(Degrees(dp=2, tp=2), {"zero_optimization": SMALL}, hccl)
    found = [(each.name, each.mib, each.is_set) for each in plan.communicators(None)]
    assert found == [("world", 50, True), ("data", 8, False), ("tensor", 300, True)]
    assert plan.options([0, 1]) == {"hccl_buffer_size": 300}
    assert plan.options([1, 3]) == {"hccl_buffer_size": 8, "hccl_op_expansion_mode": 3}
    # The world's group is the script's, with its own size unless that is set.
    assert plan.options([0, 1, 2, 3]) == {"hccl_buffer_size": 50}
    assert CommunicatorPlan(Degrees(dp=2, tp=2)).options([0, 1, 2, 3]) == {}


def test_the_priority_of_messages_is_that_of_every_communicator():
    hccl = HcclSection.model_validate({"qos": {"service_level": 3, "traffic_class": 100}})
    plan = CommunicatorPlan(Degrees(dp=2, tp=2), {}, hccl)
    for ranks in ([0, 1], [0, 2], [0, 1, 2, 3]):
        options = plan.options(ranks)
        assert (options.pop("qos_service_level"), options.pop("qos_traffic_class")) == (3, 100)
        assert "hccl_op_expansion_mode" not in options


def test_groups_of_a_context_algorithm_and_second_ones_are_told_by_name():
    hccl = HcclSection(buffer_mib={"Ulysses": 7, "context": 9})
    plan = CommunicatorPlan(Degrees(dp=2, cp=4), {}, hccl)
    assert plan.options([0, 1], "Ulysses") == {"hccl_buffer_size": 7}
    assert plan.options([0, 1, 2, 3]) == {"hccl_buffer_size": 9}
    assert plan.options([0, 1, 2, 3], "inner ring, second") == {"hccl_buffer_size": DEFAULT}
    found = {each.name: each.mib for each in plan.communicators(ContextAlgorithm(ulysses=2, ring=2))}
    assert (found["Ulysses"], found["context"]) == (7, 9)
    stages = CommunicatorPlan(Degrees(pp=4, dp=2), {}, HcclSection(buffer_mib={"pipeline": 3, "tied weights": 5}))
    assert stages.options([0, 2, 4, 6]) == {"hccl_buffer_size": 3}
    assert stages.options([0, 6], "tied weights") == {"hccl_buffer_size": stages.tied_mib()} == {"hccl_buffer_size": 5}
    assert stages.options([0, 2, 4, 6], "to higher ranks") == {"hccl_buffer_size": DEFAULT}


@pytest.mark.parametrize("grid", [Degrees(pp=2, dp=3, cp=2, tp=2), Degrees(pp=2, dp=4, tp=2, ep=2, etp=2)], ids=str)
def test_layouts_and_ranks_are_inverse(grid):
    for axes in (*GROUPS, *EXPERT_GROUPS):
        for ranks in grid.groups(*axes):
            assert box_of(ranks) == grid.box(*axes)
            assert {box_ranks(grid.box(*axes), rank) for rank in ranks} == {tuple(ranks)}


def names(
    degrees: Degrees, algorithm: ContextAlgorithm | None = None, in_stages: bool = True
) -> dict[str, tuple[int, int]]:
    """Name -> number and MiB of each buffer."""
    planned = CommunicatorPlan(degrees).communicators(algorithm, in_stages=in_stages)
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


def test_pieces_of_matrices_travel_among_the_ranks_of_a_stage():
    """Over a communicator that is there where the stage is the world or one axis, else over one of their own."""
    muon = {"optimizer": {"type": "Muon"}}
    for degrees, name in (
        (Degrees(tp=2, dp=2), "world"),
        (Degrees(pp=2, dp=2), "data"),
        (Degrees(pp=2, dp=2, tp=2), "matrices"),
    ):
        plain = CommunicatorPlan(degrees).communicators(None)
        found = CommunicatorPlan(degrees, muon).communicators(None)
        assert [each.name for each in found if "matrices" in each.messages] == [name]
        assert not any("matrices" in each.messages for each in plain)
        assert len(found) == len(plain) + (name == "matrices")
        problems = list(wrong_names(HcclSection(buffer_mib={"matrices": 8}), degrees, ContextParallelSection(), True))
        assert bool(problems) == (name != "matrices")
    assert list(wrong_names(HcclSection(buffer_mib={"matrices": 8}), degrees, ContextParallelSection(), False))


@pytest.mark.parametrize(("stages", "neighbours"), [(2, 1), (3, 2), (8, 2)])
def test_a_stage_has_at_most_two_neighbours(stages, neighbours):
    """With each a communicator for messages up and one for those down; DeepSpeed's pipelines have one for both."""
    grid = Degrees(pp=stages, dp=2)
    assert names(grid)["neighbouring stages"] == (2 * neighbours, PAIR)
    assert names(grid, in_stages=False)["neighbouring stages"] == (neighbours, PAIR)


def test_stages_without_communicators_of_pairs(monkeypatch):
    monkeypatch.setenv("P2P_HCCL_BUFFSIZE", "0")
    grid = Degrees(pp=4, dp=2)
    assert names(grid) == names(grid, in_stages=False) | {"stages, up and down": (2, DEFAULT)}


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


def communicator_rows(printed: str, count: int) -> list[str]:
    """The first rows of the table of communicators in what ``ds_npu check`` has printed, without its columns."""
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    start = lines.index("HCCL communicators of each rank, each with two buffers of device memory")
    return lines[start + 1 : start + 1 + count]


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
    assert communicator_rows(capsys.readouterr().out, 7) == [
        "group number MiB messages",
        "world 1 400 barriers, checkpoints",
        "data * context 1 16 buckets of gradients and weights (8 MiB)",
        "context 1 400 shares of sequences and losses",
        "tensor 1 400 hidden states (128 MiB)",
        "ring, pairs 2 80 keys and values",
        "all 6 1,296",
    ]


def test_check_prints_what_is_set_and_what_the_positions_of_the_model_allow(tmp_path, capsys):
    path, model = tmp_path / "ds_config.json", tmp_path / "config.json"
    section = {"parallel": {"tensor": 2}, "hccl": {"buffer_mib": {"world": 50}}}
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": SMALL, "ds_npu": section}))
    sizes = {"hidden_size": 1024, "max_position_embeddings": 4096}
    model.write_text(json.dumps({"num_attention_heads": 8, "num_key_value_heads": 8, **sizes}))
    command = ["check", str(path), "--world-size", "8"]
    assert main([*command, "--model", str(model)]) == 0
    # 2 samples * 4,096 tokens * 1,024 numbers of 4 bytes: two buffers of 32 MiB.
    assert communicator_rows(capsys.readouterr().out, 5) == [
        "group number MiB messages",
        "world 1 100 set to 50 MiB a buffer; barriers, checkpoints",
        "data 1 16 buckets of gradients and weights (8 MiB)",
        "tensor 1 64 hidden states",
        "all 3 180",
    ]
