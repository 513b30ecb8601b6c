"""What ``ds_npu.hccl`` accepts: names of communicators that the world has, and what HCCL can do with them."""

from __future__ import annotations

from typing import Any

import pytest

from ds_npu.config.check import check
from ds_npu.config.hccl import MODES
from ds_npu.config.problems import ConfigError


def problems(hccl: dict[str, Any], world_size: int | None = 8, **section: Any) -> dict[str, tuple[Any, str]]:
    """Path -> value found and what is accepted; empty where the config is right."""
    try:
        check({"train_micro_batch_size_per_gpu": 1, "ds_npu": {"hccl": hccl, **section}}, world_size)
    except ConfigError as error:
        return {each.path: (each.found, each.accepted) for each in error.problems}
    return {}


PARALLEL = {"tensor": 2, "context": 2}
RING = {"context_parallel": {"algorithm": "ring"}}
ULYSSES = {"context_parallel": {"algorithm": "hybrid", "ulysses": 2}}


@pytest.mark.parametrize(
    ("parallel", "names", "more"),
    [
        ({}, ["world"], {}),
        ({"tensor": 2}, ["world", "data", "tensor"], {}),
        (PARALLEL, ["world", "data * context", "context", "tensor"], RING),
        ({"context": 4}, ["world", "context"], RING),
        ({"context": 4}, ["world", "context", "Ulysses"], ULYSSES),
        ({"context": 4}, ["world", "context", "Ulysses"], {}),
        ({"pipeline": 2}, ["world", "data", "pipeline"], {}),
        ({"pipeline": 4}, ["world", "data", "pipeline", "tied weights"], {}),
        ({"expert": 4}, ["world", "expert data", "expert"], {}),
    ],
)
@pytest.mark.parametrize("key", ["buffer_mib", "op_expansion_mode"])
def test_the_names_are_those_of_this_worlds_communicators(key, parallel, names, more):
    value = {"buffer_mib": 1, "op_expansion_mode": "host"}[key]
    assert problems({key: dict.fromkeys(names, value)}, parallel=parallel, **more) == {}
    wrong = {"tensr": value, "ring": value, "neighbouring stages": value}
    found, accepted = problems({key: {**wrong, names[0]: value}}, parallel=parallel, **more)[f"ds_npu.hccl.{key}"]
    assert found == wrong
    assert f"8 ranks: {', '.join(names)}; " in accepted and "P2P_HCCL_BUFFSIZE" in accepted


def test_a_group_of_one_rank_has_no_communicator():
    _, accepted = problems({"buffer_mib": {"world": 8}}, world_size=1)["ds_npu.hccl.buffer_mib"]
    assert accepted == "left out: one rank has no communicator"
    assert "ds_npu.hccl.buffer_mib" in problems({"buffer_mib": {"tensor": 8}}, parallel={"tensor": 1})


def test_names_are_judged_where_the_world_and_its_axes_are_known():
    assert problems({"buffer_mib": {"tensor": 8}}, world_size=None) == {}
    assert list(problems({"buffer_mib": {"tensor": 8}}, parallel={"tensr": 2})) == ["ds_npu.parallel.tensr"]
    wrong = {"context_parallel": {"algorithm": "rings"}}
    found = problems({"buffer_mib": {"Ulysses": 8}}, parallel={"context": 4}, **wrong)
    assert list(found) == ["ds_npu.context_parallel.algorithm"]


@pytest.mark.parametrize(
    ("hccl", "path", "found", "accepted"),
    [
        ({"buffer_mib": {"world": 0}}, "buffer_mib.world", 0, "an integer >= 1"),
        ({"buffer_mib": 64}, "buffer_mib", 64, "an object, each value an integer >= 1"),
        ({"op_expansion_mode": "aiv"}, "op_expansion_mode", "aiv", "an object, each value one of 'host', 'ai_cpu'"),
        ({"op_expansion_mode": {"world": "AIV"}}, "op_expansion_mode.world", "AIV", "one of 'host', 'ai_cpu', 'aiv'"),
        ({"qos": {"service_level": 8}}, "qos.service_level", 8, "an integer >= 0 and <= 7"),
        ({"qos": {"traffic_class": 33}}, "qos.traffic_class", 33, "an integer >= 0 and <= 252 and a multiple of 4"),
        ({"qos": {"traffic_class": 256}}, "qos.traffic_class", 256, "and <= 252"),
    ],
)
def test_values_are_those_of_hccl(hccl, path, found, accepted):
    value, said = problems(hccl)[f"ds_npu.hccl.{path}"]
    assert value == found and accepted in said


def test_vector_cores_run_one_communicator_and_nothing_deterministic():
    one, two = {"tensor": "aiv", "world": "host"}, {"tensor": "aiv", "world": "aiv"}
    tensor = {"tensor": 2}
    assert problems({"op_expansion_mode": one}, parallel=tensor) == {}
    found, accepted = problems({"op_expansion_mode": two}, parallel=tensor)["ds_npu.hccl.op_expansion_mode"]
    assert found == two and "for one communicator" in accepted
    found, accepted = problems({"op_expansion_mode": one}, parallel=tensor, deterministic=True)[
        "ds_npu.hccl.op_expansion_mode"
    ]
    assert found == {"tensor": "aiv"} and "deterministic" in accepted


def test_the_modes_have_the_numbers_of_hccl_types_h():
    # hccl_types.h of CANN: hcclOpExpansionMode 0: the default, 1: host, 2: aicpu, 3: aiv.
    assert list(MODES.items()) == [("host", 1), ("ai_cpu", 2), ("aiv", 3)]
