"""Collectives in flight, against what one process makes of every rank's tensor."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from ds_npu.comm.collectives import all_gather, all_reduce, reduce_scatter
from ds_npu.comm.pending import Pending

SHAPES = ((4, 8, 3), (1, 8, 4), (2, 4, 8), (8,))


def everyones(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Each rank's tensor."""
    seeds = range(dist.get_world_size())
    return [torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in seeds]


def values_body() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for shape, transposed in itertools.product(SHAPES, (False, True)):
        whole = [x.mT if transposed and x.dim() > 1 else x for x in everyones(shape)]
        mine, kept = whole[rank], whole[rank].clone()
        total = torch.stack(whole).sum(0)
        for dim in range(-mine.dim(), mine.dim()):
            assert torch.equal(all_gather(mine, dim, None).wait(), torch.cat(whole, dim))
            if mine.shape[dim] % size == 0:
                torch.testing.assert_close(
                    reduce_scatter(mine, dim, None).wait(), total.chunk(size, dim)[rank], rtol=1e-14, atol=1e-14
                )
        assert torch.equal(mine, kept)
        summed = mine.clone(memory_format=torch.contiguous_format)
        assert all_reduce(summed, None).wait() is summed
        torch.testing.assert_close(summed, total, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values(world_size):
    run_on_ranks(world_size, values_body)


class Copies(TorchDispatchMode):
    """Counts the tensors that are copied to other places (gloo's own copy_ at the end of a reduce-scatter is not)."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.cat)
        return func(*args, **(kwargs or {}))


def copies_body() -> None:
    for shape, dim, copies in (((1, 4, 3), 1, 0), ((4, 3), 0, 0), ((2, 4, 3), 1, 1)):
        x = torch.ones(shape)
        for collective in (all_gather, reduce_scatter):
            with Copies() as counted:
                collective(x, dim, None).wait()
            assert counted.count == copies, (collective, shape)


def test_nothing_is_copied_without_need():
    run_on_ranks(2, copies_body)


def alone_body() -> None:
    x = torch.ones(2, 3)
    for pending in (all_reduce(x, None), all_gather(x, 1, None), reduce_scatter(x, 1, None)):
        assert pending.wait() is x


def test_a_rank_alone_gets_its_own_tensor():
    run_on_ranks(1, alone_body)


def refusals_body() -> None:
    with pytest.raises(ValueError, match=r"dim 1 of shape \(2, 3\) does not divide by the 2 ranks"):
        reduce_scatter(torch.ones(2, 3), 1, None)
    with pytest.raises(ValueError, match=r"needs a contiguous tensor; found strides \(1, 3\)"):
        all_reduce(torch.ones(2, 3).t(), None)


def test_what_cannot_be_done_is_refused():
    run_on_ranks(2, refusals_body)


class Waits:
    """Work that counts how often it is waited for."""

    def __init__(self) -> None:
        self.count = 0

    def wait(self) -> None:
        self.count += 1


def test_a_pending_value_is_finished_once():
    work = Waits()
    pending = Pending(torch.ones(2), work, lambda value: value + 1)
    assert work.count == 0
    first = pending.wait()
    assert pending.wait() is first
    assert first.tolist() == [2.0, 2.0]
    assert work.count == 1
