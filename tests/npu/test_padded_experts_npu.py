"""Padded experts over simulated NPUs: which calls of a layer make the host wait for the device."""

from __future__ import annotations

from collections import Counter

import expert_cases
import torch
from expert_cases import LAYOUTS, E, K
from ranks import run_on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from ds_npu.features.experts.capacity import CapacityLimit
from ds_npu.parallel.expert.axis import ExpertAxis
from ds_npu.parallel.expert.capacity import capacity_of, compute_padded
from ds_npu.parallel.expert.experts import ExpertOptions, compute_experts
from ds_npu.parallel.expert.weights import ExpertWeights
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology


class HostWaits(TorchDispatchMode):
    """Counts what copies from the device to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        arrived = isinstance(out, torch.Tensor) and out.device.type == "cpu"
        from_device = any(isinstance(each, torch.Tensor) and each.device.type == "npu" for each in args)
        if str(func) == "aten._local_scalar_dense.default" or (arrived and from_device):
            self.found[str(func)] += 1
        return out


def layers() -> None:
    axis = ExpertAxis.of(Topology(Degrees(dp=2, ep=2)), tokens_are_sharded=False)
    layout = LAYOUTS["gate"]
    of = {
        name: layout.shard(name, each, axis).float().npu().requires_grad_() for name, each in layout.weights().items()
    }
    experts = ExpertWeights(of["up"], of["down"], layout.activation)
    torch.manual_seed(axis.rank)
    x, weights = torch.randn(9, expert_cases.H).npu().requires_grad_(), torch.rand(9, K).npu().requires_grad_()
    ids = torch.rand(9, E).argsort(1)[:, :K].npu()

    def run(dispatcher):
        def compute(x, ids, weights):
            return compute_experts(x, ids, weights, experts, axis, ExpertOptions(dispatcher))

        limit = CapacityLimit(1.0, "probs", dispatcher == "evenly", 1, E, "layers.*")
        kept = limit.within(ids, weights)
        if dispatcher != "evenly":
            out = compute(x, kept, weights)
        else:
            # The most tokens are known; the layers before this one agreed on them.
            out = compute_padded(compute, x, kept, weights, E, capacity_of(9, K, E, 1.0))
        (dx,) = torch.autograd.grad(out.square().sum(), x)
        return out.detach(), dx

    # Operators are checked at their first call.
    expected = run("alltoall")
    with HostWaits() as counted:
        run("alltoall")
    with HostWaits() as padded:
        found = run("evenly")
    assert counted.found and not padded.found, (counted.found, padded.found)
    for one, two in zip(found, expected, strict=True):
        assert float((one - two).abs().max() / two.abs().max()) <= 1e-5


def test_a_padded_layer_waits_for_nothing():
    run_on_ranks(2, layers, backend="hccl", sets_device=True)
