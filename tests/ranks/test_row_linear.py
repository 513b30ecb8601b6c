"""Row-parallel linear layers whose output a model modifies in place, as Falcon does; against nn.Linear."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch import nn

from ds_npu.parallel.runtime.placement import sharding_of
from ds_npu.parallel.tensor.axis import Always
from ds_npu.parallel.tensor.linear import RowParallelLinear
from ds_npu.parallel.tensor.overlapped_matmul import Pipelined
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

B, S, H, F = 2, 8, 6, 10


def layers(bias, topology, sequence_parallel):
    torch.manual_seed(3)
    plain = nn.Linear(F, H, bias, dtype=torch.float64)
    torch.manual_seed(3)
    return plain, RowParallelLinear(F, H, topology, bias, sequence_parallel, dtype=torch.float64)


def adds_in_place() -> None:
    topology, rank = Topology(Degrees(tp=dist.get_world_size())), dist.get_rank()
    group, size = topology.group("tp"), topology.size("tp")
    overlaps = [None, Always(Pipelined(group, pieces=2))]
    for bias, sequence_parallel in ((True, False), (False, False), (True, True), (False, True)):
        for overlap in overlaps if sequence_parallel else overlaps[:1]:
            plain, row = layers(bias, topology, sequence_parallel)
            if overlap is not None:
                object.__setattr__(row.axis, "collectives", overlap)
            generator = torch.Generator().manual_seed(5)
            x = torch.randn(B, S, F, generator=generator, dtype=torch.float64)
            residual, upstream = torch.randn(2, B, S, H, generator=generator, dtype=torch.float64)
            inputs = sharding_of(row.weight)
            mine = torch.cat([x[..., start:stop] for start, stop in inputs.ranges[rank]], -1).requires_grad_()
            whole = x.clone().requires_grad_()
            rows = torch.arange(S).tensor_split(size)[rank] if sequence_parallel else torch.arange(S)

            expected = plain(whole)
            expected += residual
            expected.backward(upstream)
            found = row(mine)
            found += residual[:, rows]
            found.backward(upstream[:, rows])
            torch.testing.assert_close(found, expected[:, rows], rtol=0, atol=1e-13)
            dx = torch.cat([whole.grad[..., start:stop] for start, stop in inputs.ranges[rank]], -1)
            torch.testing.assert_close(mine.grad, dx, rtol=0, atol=1e-13)
            torch.testing.assert_close(row.weight.grad, inputs.take(plain.weight.grad, rank), rtol=0, atol=1e-13)
            if bias:
                torch.testing.assert_close(row.bias.grad, plain.bias.grad, rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [1, 2])
def test_the_output_may_be_added_to_in_place(size):
    run_on_ranks(size, adds_in_place)


def differentiates_twice() -> None:
    topology, rank = Topology(Degrees(tp=dist.get_world_size())), dist.get_rank()
    plain, row = layers(False, topology, False)
    x = torch.randn(B, S, F, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    sharding, found = sharding_of(row.weight), []
    parts = [x, torch.cat([x[..., start:stop] for start, stop in sharding.ranges[rank]], -1)]
    for layer, given in zip((plain, row), parts, strict=True):
        leaf = given.requires_grad_()
        y = layer(leaf)
        y += 1
        (dx,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
        found += torch.autograd.grad(dx.square().sum(), layer.weight)
    torch.testing.assert_close(found[1], sharding.take(found[0], rank), rtol=0, atol=1e-13)


def test_gradients_of_gradients_of_an_output_that_was_added_to():
    run_on_ranks(2, differentiates_twice)
