"""A new dispatcher is one class that says what it can do: this one sends the tokens of one rank after another's."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import expert_rule
import pytest
import torch
import torch.distributed as dist
from expert_cases import LAYOUTS, ROUTINGS, ExpertOptions, LayerCase, Numbers, check_layer
from ranks import run_on_ranks

from ds_npu.comm.pending import Pending
from ds_npu.config import moe
from ds_npu.config.check import check
from ds_npu.config.problems import ConfigError
from ds_npu.parallel.expert import experts
from ds_npu.parallel.expert.axis import ExpertAxis
from ds_npu.parallel.expert.dispatch import pairs_of
from ds_npu.parallel.expert.experts import Planned, register_dispatcher
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

NAME = "in_turn"


@dataclass(frozen=True)
class InTurn:
    """All tokens of all ranks on every rank, by a broadcast from each and a sum on each."""

    axis: ExpertAxis
    tokens: tuple[int, ...]
    pairs_of_experts: tuple[int, ...]
    fills_up: bool = False

    def send(self, x):
        parts = [x if rank == self.axis.rank else x.new_empty(n, *x.shape[1:]) for rank, n in enumerate(self.tokens)]
        for rank, part in enumerate(parts):
            dist.broadcast(part, dist.get_global_rank(self.axis.group, rank), group=self.axis.group)
        return Pending(torch.cat(parts), None)

    send_copies = send

    def combine(self, rows):
        parts = [part.clone() for part in rows.split(list(self.tokens))]
        for rank, part in enumerate(parts):
            dist.reduce(part, dist.get_global_rank(self.axis.group, rank), group=self.axis.group)
        return Pending(parts[self.axis.rank], None)


class InTurnPlan:
    """The plan of ``InTurn``."""

    def __init__(self, ids, count, axis):
        self.axis = axis
        self.counts = torch.cat([ids.new_tensor([len(ids)]), pairs_of(ids, count)])

    def prepare(self):
        return

    def copies(self, x):
        return x.contiguous()

    labels = copies

    def dispatch(self, counts):
        local = (len(counts[0]) - 1) // self.axis.ep
        first = 1 + self.axis.ep_rank * local
        pairs = tuple(sum(each[at] for each in counts) for at in range(first, first + local))
        return InTurn(self.axis, tuple(each[0] for each in counts), pairs)


@pytest.fixture
def registered():
    register()
    yield
    del moe.ABILITIES[NAME], experts.DISPATCHERS[NAME]


def register() -> None:
    register_dispatcher(NAME, Planned(moe.Dispatching("all ranks", replicates=False), InTurnPlan))


def layers(degrees: Degrees) -> None:
    register()
    options = [ExpertOptions(NAME, level) for level in ("none", "level0", "level1")]
    topology = Topology(degrees)
    for each in itertools.product(ROUTINGS, LAYOUTS.values(), options, {False, degrees.tp > 1}):
        check_layer(topology, LayerCase(*each), Numbers())


def engine() -> None:
    register()
    options = {"dispatcher": NAME, "overlap": True, "zero_memory": "level0"}
    expert_rule.hold_to_one_process("mixtral", {"expert": 2}, options, (1,), {})


@pytest.mark.parametrize("degrees", [Degrees(dp=2, ep=2), Degrees(dp=2, tp=2, ep=2, etp=2)], ids=str)
def test_a_layer(degrees):
    run_on_ranks(degrees.world_size, layers, degrees)


def test_a_model_whose_config_names_it():
    run_on_ranks(2, engine, deadline_s=600.0)


def problems(**keys: object) -> list[str]:
    pad = {"capacity_factor": 1.0} if "pad_to_capacity" in keys else {}
    section = {"parallel": {"expert": 2}, "moe": {"dispatcher": NAME, **pad, **keys}}
    try:
        check({"train_micro_batch_size_per_gpu": 1, "ds_npu": section}, 2)
    except ConfigError as error:
        return [str(each) for each in error.problems]
    return []


def test_rules_read_what_it_says(registered):
    assert not problems() and not problems(overlap=True, zero_memory="level1")
    assert problems(replica_rows=4) == [
        "ds_npu.moe.replica_rows: found 4; 0 with ds_npu.moe.dispatcher 'in_turn'",
    ]
    assert problems(row_margin=1.5) == [
        "ds_npu.moe.row_margin: found 1.5; left out with ds_npu.moe.dispatcher 'in_turn'",
    ]
    (line,) = problems(pad_to_capacity=True)
    assert line.startswith("ds_npu.moe.dispatcher: found \"in_turn\"; 'alltoall' or left out")


def test_a_name_that_nothing_registered_is_refused():
    assert problems() == [
        "ds_npu.moe.dispatcher: found \"in_turn\"; one of 'alltoall', 'allgather', 'fused' or null",
    ]
