"""Tiny models sharded over all ranks of a world, without an engine, and the same model in one process beside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import tensor_parallel_rule
import tiny_models
import torch
import torch.distributed as dist
from torch import nn

from ds_npu.features.tensor_parallel.sharded_model import shard_model
from ds_npu.models.globs import plan_for
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

EXACT = 1e-12
LENGTH = 9
"""No number of ranks divides it."""


def first_fast(name: str, values: Iterable[object]) -> pytest.MarkDecorator:
    """Parametrize ``name``: the first value is always run, the others where slow tests are."""
    first, *others = values
    return pytest.mark.parametrize(name, [first, *(pytest.param(each, marks=pytest.mark.slow) for each in others)])


@dataclass(frozen=True)
class Pair:
    """A split model and the plain one that it was."""

    model: nn.Module
    plain: nn.Module
    topology: Topology

    def gradients(self) -> dict[str, torch.Tensor]:
        """Whole gradients of the split model."""
        return {
            name: tensor_parallel_rule.assembled(self.topology, weight, weight.grad)
            for name, weight in self.model.named_parameters()
            if weight.grad is not None
        }

    def same_gradients(self) -> None:
        """Every gradient is the plain model's."""
        found = self.gradients()
        expected = {name: weight.grad for name, weight in self.plain.named_parameters() if weight.grad is not None}
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            close(found[name], gradient, name)


def pair(family: str, sequence_parallel: bool = False, dtype: torch.dtype = torch.float64, **changes: object) -> Pair:
    """Sharded over all ranks of this world."""
    topology = Topology(Degrees(tp=dist.get_world_size()))
    model = tiny_models.tiny(family, dtype, **changes)
    shard_model(model, plan_for(model, {}), topology, sequence_parallel)
    return Pair(model, tiny_models.tiny(family, dtype, **changes), topology)


def close(found: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Equal in float64, up to the order of sums."""
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    error, largest = float((found - expected).abs().max()), float(expected.abs().max())
    assert error <= EXACT * largest, (what, error, largest)


def everyones(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What each rank has; the same shape everywhere."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.detach().contiguous())
    return found


def agree(tensor: torch.Tensor) -> bool:
    """Whether every rank has the same, to the bit."""
    return all(torch.equal(tensor, each) for each in everyones(tensor))
