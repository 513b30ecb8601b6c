"""A layer whose experts are filled up to their capacity: the loop in one process, and no wait of the host."""

from __future__ import annotations

import itertools
import traceback
from collections import Counter

import expert_cases
import pytest
import torch
import torch.distributed as dist
from expert_capacity import limited
from expert_cases import LAYOUTS, E, K, off
from ranks import run_on_ranks
from torch import nn
from torch.overrides import TorchFunctionMode

from ds_npu.features.experts.capacity import CapacityLimit, agrees_on_tokens
from ds_npu.parallel.expert.axis import ExpertAxis
from ds_npu.parallel.expert.capacity import capacity_of, compute_in_shares
from ds_npu.parallel.expert.experts import ExpertOptions, compute_experts
from ds_npu.parallel.expert.overlap import compute_experts_in_halves
from ds_npu.parallel.expert.weights import ExpertWeights
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

FACTOR, LAYERS = 0.9, 3
WORLDS = [
    Degrees(dp=1),
    Degrees(dp=2, ep=2),
    Degrees(tp=2, etp=2),
    Degrees(tp=2, ep=2),
    Degrees(dp=2, tp=2, ep=2, etp=2),
    Degrees(dp=2, tp=2, ep=4),
]


WAITING = {getattr(torch.Tensor, name) for name in ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__")}


class HostWaits(TorchFunctionMode):
    """Counts the calls that make the host wait for a device, but those of operators' references on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in WAITING:
            stack = [f"{each.filename}:{each.name}" for each in traceback.extract_stack()]
            if not any("grouped_matmul.py" in each for each in stack):
                self.found[next(each for each in reversed(stack) if "/ds_npu/" in each)] += 1
        return func(*args, **(kwargs or {}))


class Layers(nn.Module):
    """Calls some layers of experts, one after the other."""

    def __init__(self, layers) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, *args: torch.Tensor) -> list[torch.Tensor]:
        return [layer(*args) for layer in self.layers]


def check(degrees: Degrees, routing: str, shared: bool, halves: bool) -> None:
    topology = Topology(degrees)
    axis = ExpertAxis.of(topology, tokens_are_sharded=not shared)
    source = topology.ranks("tp")[0] if shared else topology.global_rank
    layout = LAYOUTS["transposed with biases" if degrees.etp == 1 else "gate"]
    of = {name: layout.shard(name, each, axis).requires_grad_() for name, each in layout.weights().items()}
    biases = of.get("up_bias"), of.get("down_bias")
    experts = ExpertWeights(of["up"], of["down"], layout.activation, layout.is_transposed, *biases)

    def compute(x, ids, weights):
        if halves:
            return compute_experts_in_halves((x, ids, weights), experts, axis, ExpertOptions("evenly"))
        return compute_experts(x, ids, weights, experts, axis, ExpertOptions("evenly"))

    def all_tokens(x, ids, weights):
        return compute_in_shares(compute, x, ids, weights, axis.same_tokens) if shared else compute(x, ids, weights)

    def layer(x, ids, weights):
        own = CapacityLimit(FACTOR, "probs", True, 2 if halves else 1, E, "layers.*")
        return own.compute(all_tokens, x, own.within(ids, weights), weights, axis)

    model = Layers([layer] * LAYERS)
    agrees_on_tokens(model).make()
    x, ids, weights = expert_cases.tokens_of(source, routing)
    ids = ids.clone()
    mine = x.clone().requires_grad_(), weights.clone().requires_grad_()
    with HostWaits() as waits:
        outs = model(mine[0], ids, mine[1])
        sum((out * expert_cases.coefficients(source, out)).sum() for out in outs).backward()
    assert sum(waits.found.values()) == (1 if axis.size > 1 else 0), waits.found
    kept = limited(ids, weights, capacity_of(len(ids), K, E, FACTOR), "probs")
    assert routing != "any" or (kept != ids).any()
    x.requires_grad_(), weights.requires_grad_()
    right = expert_cases.plain(x, kept, weights, layout.weights(), layout)
    (LAYERS * right * expert_cases.coefficients(source, right)).sum().backward()
    errors = [off(out.detach(), right.detach()) for out in outs]
    errors += [off(each.grad, theirs.grad) for each, theirs in zip(mine, (x, weights), strict=True)]
    assert max(errors) <= expert_cases.EXACT, (degrees, routing, shared, halves, errors)
    dist.barrier()


def every_case(degrees: Degrees) -> None:
    for routing in ("any", "some nowhere", "none here"):
        for shared, halves in itertools.product({False, degrees.tp > 1}, (False, True)):
            check(degrees, routing, shared, halves)


@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize(
    "degrees",
    [pytest.param(each, id=f"{each}", marks=() if each.world_size < 4 else pytest.mark.slow) for each in WORLDS],
)
def test_padded_layers_compute_as_the_loop_and_wait_once_in_a_forward(degrees):
    run_on_ranks(degrees.world_size, every_case, degrees)
