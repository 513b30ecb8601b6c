"""Dropout differs over tensor ranks inside of regions and agrees outside, and everything repeats."""

from __future__ import annotations

import pytest
import torch
from ranks import run_on_ranks
from region_dropout import alignment_body, checkpoint_body, mask, regions_body, tensor_world
from torch import nn

from ds_npu.parallel.tensor.randomness import RegionRandomness, align_generators


@pytest.mark.parametrize("world", [2, 4])
def test_regions(world):
    run_on_ranks(world, regions_body, "cpu")


def test_recomputation_repeats():
    run_on_ranks(2, checkpoint_body, "cpu")


def test_alignment():
    run_on_ranks(4, alignment_body, "cpu")


def one_rank_body() -> None:
    numbers = RegionRandomness(tensor_world(), "cpu")
    torch.manual_seed(5)
    expected = [mask("cpu") for _ in range(3)]
    torch.manual_seed(5)
    align_generators(tensor_world(), "cpu")
    found = [mask("cpu")]
    with numbers.region():
        found.append(mask("cpu"))
    found.append(mask("cpu"))
    assert all(map(torch.equal, found, expected))


def test_one_tensor_rank_changes_nothing():
    run_on_ranks(1, one_rank_body)


class Failing(nn.Module):
    """Draws, then raises."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        raise ArithmeticError("as planned")


def exceptions_body() -> None:
    numbers = RegionRandomness(tensor_world(), "cpu")
    module = Failing()
    torch.manual_seed(5)
    torch.randint(2**63 - 1, ())
    after = torch.get_rng_state()
    torch.manual_seed(5)
    with pytest.raises(ArithmeticError), numbers.region(), numbers.region():
        module(torch.ones(1))
    assert torch.equal(torch.get_rng_state(), after)
    numbers.leave()
    assert torch.equal(torch.get_rng_state(), after)


def test_a_region_ends_also_where_something_raises():
    run_on_ranks(2, exceptions_body)


def deepspeed_body() -> None:
    """DeepSpeed's own activation checkpointing saves the generators' states, too."""
    import deepspeed
    from region_dropout import Block, one_step

    numbers = RegionRandomness(tensor_world(), "cpu")
    block = Block(numbers)
    x = torch.randn(32, 16)
    plain = one_step([block], x, None)
    torch.manual_seed(11)
    leaf = x.clone().requires_grad_()
    block.zero_grad()
    y = deepspeed.checkpointing.checkpoint(block, leaf)
    y.square().sum().backward()
    found = [y.detach(), leaf.grad, *(each.grad for each in block.parameters())]
    assert all(map(torch.equal, found, plain[: len(found)]))


def test_deepspeeds_checkpointing():
    run_on_ranks(2, deepspeed_body)
