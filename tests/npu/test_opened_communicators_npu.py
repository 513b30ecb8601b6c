"""HCCL's communicators are opened before they are used: in one order, with the section's options, and told of."""

from __future__ import annotations

import os
import re
import time

import gradient_rule as rule
import hccl_calls
import pytest
import tiny_models
import torch
import torch.distributed as dist
from hccl_ranks import endings
from logged_lines import logged_lines
from ranks import run_on_ranks

from ds_npu.comm.communicator import open_communicator

UNSET = 0xFFFFFFFF
"""hccl_types.h: HCCL_COMM_TRAFFIC_CLASS_CONFIG_NOT_SET and HCCL_COMM_SERVICE_LEVEL_CONFIG_NOT_SET."""
PAIR_MIB = 20
"""MiB of each buffer of a communicator of two ranks that send to each other: P2P_HCCL_BUFFSIZE."""
BUCKETS = {"reduce_bucket_size": 2**21, "allgather_bucket_size": 2**20, "stage3_prefetch_bucket_size": 10}
"""Elements; 8 MiB is the largest."""
QOS = {"service_level": 3, "traffic_class": 100}


def config(section: dict) -> dict:
    return rule.config(1, torch.float32, {}, **BUCKETS) | {"ds_npu": section}


def engine_of(section: dict, model: torch.nn.Module):
    import deepspeed

    rule.without_extension()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(section))[0]


def opened(section: dict, expected: list[tuple], moe: bool = False) -> None:
    """Make an engine and take a step; ``expected``: name in the log, and what HCCL was given."""
    lines = logged_lines()
    model = tiny_models.tiny(
        "mixtral" if moe else "llama", torch.float32, num_hidden_layers=6 if "pipeline" in section["parallel"] else 2
    )
    engine = engine_of(section, model)
    before = hccl_calls.openings()
    # Those of pairs of ranks have no options.
    assert [given for _, given in before if given[1] != PAIR_MIB] == [given for _, given in expected]
    said = [line for line in lines if re.match(r"HCCL communicator \d", line)]
    in_pairs = [line for line in lines if line.startswith("HCCL communicator of two, ")]
    if dist.get_rank() == 0:
        pattern = r"HCCL communicator \d of \d, (.*): (\d+) ranks, 2 buffers of (\d+) MiB, opened in (\d+\.\d\d) s"
        found = [re.fullmatch(pattern, line).groups() for line in said]
        assert [(name, int(ranks), int(mib)) for name, ranks, mib, _ in found] == [
            (name, *given[:2]) for name, given in expected
        ]
        assert all(0 <= float(seconds) < 60 for *_, seconds in found)
        of_pairs = [given for _, given in before if given[1] == PAIR_MIB]
        assert len(in_pairs) == len(of_pairs)
    else:
        assert said == in_pairs == []
    tokens = tiny_models.tokens(rule.MICRO, 16).to(engine.device)
    for _ in range(rule.ACCUMULATION):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    dist.barrier()
    during = hccl_calls.openings()[len(before) :]
    if "context" in section["parallel"] and "context_parallel" not in section:
        # The algorithm is chosen with the first batch.
        during = [row for row in during if row[1][1] != PAIR_MIB]
    assert during == []


PLAIN = (0, UNSET, UNSET)
GIVEN = (0, 100, 3)
CASES = {
    # Hidden states of a tiny model take 1 MiB, buckets 8, and the environment says 200.
    "tensor": (
        4,
        {"parallel": {"tensor": 2}},
        [("world", (4, 200, *PLAIN)), ("data", (2, 8, *PLAIN)), ("tensor", (2, 1, *PLAIN))],
        False,
    ),
    "set": (
        4,
        {
            "parallel": {"tensor": 2},
            "hccl": {"buffer_mib": {"tensor": 7, "world": 9}, "op_expansion_mode": {"data": "aiv"}, "qos": QOS},
        },
        [("world", (4, 9, *GIVEN)), ("data", (2, 8, 3, 100, 3)), ("tensor", (2, 7, *GIVEN))],
        False,
    ),
    "context": (
        4,
        {
            "parallel": {"context": 4},
            "context_parallel": {"algorithm": "hybrid", "ulysses": 2},
            "hccl": {"buffer_mib": {"Ulysses": 5}},
        },
        [("world", (4, 200, *PLAIN)), ("Ulysses", (2, 5, *PLAIN))],
        False,
    ),
    "chosen with the first batch": (2, {"parallel": {"context": 2}}, [("world", (2, 200, *PLAIN))], False),
    "experts": (
        4,
        {"parallel": {"expert": 2}},
        [("world", (4, 200, *PLAIN)), ("expert data", (2, 8, *PLAIN)), ("expert", (2, 1, *PLAIN))],
        True,
    ),
    "stages": (2, {"parallel": {"pipeline": 2}}, [("world", (2, 200, *PLAIN))], False),
    "stages, twice": (
        3,
        {"parallel": {"pipeline": 3}, "pipeline": {"virtual_stages": 2}},
        [("world", (3, 200, *PLAIN))],
        False,
    ),
    "ring": (
        3,
        {"parallel": {"context": 3}, "context_parallel": {"algorithm": "ring"}},
        [("world", (3, 200, *PLAIN))],
        False,
    ),
    "double ring": (
        4,
        {"parallel": {"context": 4}, "context_parallel": {"algorithm": "ring", "window": 2}},
        [("world", (4, 200, *PLAIN))],
        False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_communicator_is_opened_with_its_options_and_in_one_order(name):
    ranks, section, expected, moe = CASES[name]
    run_on_ranks(ranks, opened, section, expected, moe, backend="hccl", sets_device=False)


def without_pairs() -> None:
    os.environ["P2P_HCCL_BUFFSIZE"] = "0"
    model = tiny_models.tiny("llama", torch.float32, num_hidden_layers=6)
    with pytest.raises(ValueError, match=r"P2P_HCCL_BUFFSIZE is 0, so that the 3 pipeline ranks .* with 6 stages"):
        engine_of({"parallel": {"pipeline": 3}, "pipeline": {"schedule": "zb_v"}}, model)


def test_several_stages_on_a_rank_need_communicators_of_pairs():
    """Over one communicator the ranks of such a pipeline wait for each other for ever."""
    run_on_ranks(3, without_pairs, backend="hccl", sets_device=False)


def already_open() -> None:
    lines = logged_lines()
    torch.npu.set_device(dist.get_rank())
    dist.barrier()
    engine_of({"hccl": {"buffer_mib": {"world": 9}}}, torch.nn.Linear(2, 2))
    assert [row[1][1] for row in hccl_calls.openings()] == [200]
    if dist.get_rank() == 0:
        (line,) = (line for line in lines if line.startswith("ds_npu.hccl"))
        assert "the communicator world was open before the engine was made, without {'hccl_buffer_size': 9}" in line


def test_options_of_a_communicator_that_the_script_has_opened_are_warned_of():
    run_on_ranks(2, already_open, backend="hccl")


def one_rank_is_missing() -> None:
    group = dist.new_group([0, 1], group_desc="planted")
    if dist.get_rank() == 0:
        open_communicator(group, "tensor")
    time.sleep(8)


def test_a_missing_rank_is_named_with_the_communicator():
    ended = endings(2, one_rank_is_missing, HCCL_CONNECT_TIMEOUT="3")
    assert ended[0].code == 3 and 2 < ended[0].waited_s < 20
    assert "rank 0 could not open the HCCL communicator tensor of ranks 0, 1 within" in ended[0].said
    assert "Not begun by ranks 1. What to do: " in ended[0].said
