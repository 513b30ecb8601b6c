"""Random numbers inside and outside of tensor-parallel regions, on every rank of one tensor-parallel group.

Each function runs on the given device, and returns nothing: ranks compare with each other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ds_npu.parallel.tensor.randomness import RegionRandomness, align_generators
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

MANY = 4000


def tensor_world() -> Topology:
    return Topology(Degrees(tp=dist.get_world_size()))


def everyones(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What each rank has; the same shape everywhere."""
    tensor = tensor.detach().contiguous()
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return [each.cpu() for each in found]


def agree(tensor: torch.Tensor) -> bool:
    first, *others = everyones(tensor)
    return all(torch.equal(first, other) for other in others)


def independent(tensors: list[torch.Tensor]) -> None:
    """Masks of dropout at one half, compared in pairs, are equal in about half of their elements (5 sigmas)."""
    for index, one in enumerate(tensors):
        for other in tensors[:index]:
            equal = (one == other).double().mean().item()
            assert abs(equal - 0.5) < 2.5 / one.numel() ** 0.5, equal


def mask(device: str) -> torch.Tensor:
    return functional.dropout(torch.ones(MANY, device=device), 0.5)


def seed(value: int) -> None:
    """All default generators, of which the default device's is one."""
    torch.manual_seed(value)


def regions_body(device: str) -> None:
    numbers = RegionRandomness(tensor_world(), device)
    rank = dist.get_rank()

    def all_masks() -> dict[str, torch.Tensor]:
        found = {"before": mask(device)}
        with numbers.region():
            found["in 1"] = mask(device)
            for _ in range(rank):  # heads are uneven: some ranks draw more
                mask(device)
            with numbers.region():
                found["in 2"] = mask(device)
            found["in 3"] = mask(device)
            numbers.leave()
            found["left early"] = mask(device)
        found["between"] = mask(device)
        with numbers.region():
            found["in 4"] = mask(device)
        found["host"] = torch.rand(MANY).to(device).sub_(0.5).sign_()
        found["after"] = mask(device)
        return found

    seed(7)
    first = all_masks()
    for name, found in first.items():
        if name.startswith("in "):
            independent(everyones(found))
        else:
            assert agree(found), name
    independent([found.cpu() for name, found in first.items() if name != "host"])
    seed(7)
    for name, found in all_masks().items():
        assert torch.equal(found, first[name]), name
    seed(8)
    independent([all_masks()["in 1"].cpu(), first["in 1"].cpu()])


class Block(nn.Module):
    """Column linear, dropout inside the region, row linear, dropout outside of it."""

    def __init__(self, numbers: RegionRandomness) -> None:
        super().__init__()
        self.column, self.row = nn.Linear(16, 64), nn.Linear(64, 16)
        self.numbers, self.inner = numbers, False

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(functional.gelu(x), 0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(x, 0.1)
        with self.numbers.region():
            x = self.row(self.within(self.column(x)))
        return x + functional.dropout(x, 0.3)

    def within(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.middle, x, use_reentrant=False) if self.inner else self.middle(x)


def one_step(blocks: list[Block], x: torch.Tensor, how: dict[str, Any] | None) -> list[torch.Tensor]:
    """Output, gradients and, after everything, the next numbers of the device and of the host."""
    seed(11)
    leaf = y = x.clone().requires_grad_()
    for block in blocks:
        block.zero_grad()
        y = block(y) if how is None else checkpoint(block, y, **how)
    y.square().sum().backward()
    gradients = [parameter.grad.clone() for block in blocks for parameter in block.parameters()]
    return [y.detach(), leaf.grad, *gradients, mask(x.device.type), torch.rand(5)]


def checkpoint_body(device: str) -> None:
    """Recomputed or not: the same to the bit."""
    numbers = RegionRandomness(tensor_world(), device)
    torch.manual_seed(1)
    x = torch.randn(32, 16).to(device)
    blocks = [Block(numbers).to(device) for _ in range(3)]
    plain = one_step(blocks, x, None)
    for inner in (False, True):
        for block in blocks:
            block.inner = inner
        for how in (None, {"use_reentrant": True}, {"use_reentrant": False}):
            found = one_step(blocks, x, how)
            assert all(map(torch.equal, found, plain)), (inner, how)
    assert not agree(plain[0])
    assert agree(plain[-2])


def alignment_body(device: str) -> None:
    """Two tensor-parallel groups, each rank with a seed of its own."""
    topology = Topology(Degrees(dp=2, tp=dist.get_world_size() // 2))
    torch.manual_seed(100 + dist.get_rank())
    align_generators(topology, device)
    for found in (mask(device), torch.rand(MANY).to(device)):
        every = everyones(found)
        for rank in range(dist.get_world_size()):
            place = topology.degrees.coordinates(rank)
            assert torch.equal(every[rank], every[place["dp"] * topology.size("tp")])
        assert not torch.equal(every[0], every[topology.size("tp")])
    torch.manual_seed(100)
    expected = [mask(device), torch.rand(MANY)]
    torch.manual_seed(100 + dist.get_rank())
    align_generators(topology, device)
    if topology.rank("dp") == 0:
        assert torch.equal(mask(device), expected[0])
