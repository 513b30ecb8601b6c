"""Differentiable collectives between ranks that hold the same tensor and ranks that hold shards or summands of it.

Each runs one collective forward, or none, and its conjugate backward (Megatron-LM, arXiv 1909.08053 section 3 and
2205.05198 section 4.2):

    copy             identity         / all-reduce          the same  -> used by each rank for its part
    reduce           all-reduce       / identity            summands  -> the same
    gather           all-gather       / reduce-scatter      shards    -> used by each rank for its part
    scatter_sum      reduce-scatter   / all-gather          summands  -> shards
    shard            slice            / all-gather          the same  -> shards
    collect          all-gather       / slice               shards    -> the same

"The same" means that the ranks hold equal values and have equal gradients; "used by each rank for its part", that each
rank's gradient is a summand of the whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ds_npu.comm.collectives import all_gather, all_reduce, reduce_scatter
from ds_npu.ops.autograd import Context, applied

Group = dist.ProcessGroup | None
"""A process group of this rank; None: the world."""
Crossing = Callable[[torch.Tensor, int, Group], torch.Tensor]
"""Maps a tensor, the dim of its shards and their group to the tensor on the other side."""


def _same(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    return x.view_as(x)


def _sum(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    return all_reduce(x.clone(memory_format=torch.contiguous_format), group).wait()


def _slice(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    size = x.shape[dim] // dist.get_world_size(group)
    rank = dist.get_rank() if group is None else group.rank()
    return x.narrow(dim, rank * size, size).contiguous()


def _gather(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    return all_gather(x.contiguous(), dim, group).wait()


def _scatter(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    return reduce_scatter(x.contiguous(), dim, group).wait()


class _CrossContext(Context):
    conjugate: Crossing
    dim: int
    group: Group


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _CrossContext, x: torch.Tensor, crossing: Crossing, conjugate: Crossing, dim: int, group: Group
    ) -> torch.Tensor:
        ctx.conjugate, ctx.dim, ctx.group = conjugate, dim, group
        return crossing(x, dim, group)

    @staticmethod
    def backward(ctx: _CrossContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.conjugate(grads[0], ctx.dim, ctx.group), None, None, None, None


_cross = applied(_Cross, _Cross.forward)


def copy(x: torch.Tensor, group: Group) -> torch.Tensor:
    """``x`` as it is; its gradients are summed over ``group``."""
    return _cross(x, _same, _sum, 0, group)


def reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of ``x`` over ``group``; its gradient is not changed."""
    return _cross(x, _sum, _same, 0, group)


def gather(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """The shards of ``group`` joined along ``dim``; their gradients are summed over ``group`` and sharded."""
    return _cross(x, _gather, _scatter, dim, group)


def scatter_sum(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This rank's shard, along ``dim``, of the sum of ``x`` over ``group``; its gradients are gathered."""
    return _cross(x, _scatter, _gather, dim, group)


def shard(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This rank's shard, along ``dim``, of ``x``, which all of ``group`` hold; its gradients are gathered."""
    return _cross(x, _slice, _gather, dim, group)


def collect(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """The shards of ``group`` joined along ``dim``; every rank uses it alike and shards its gradient."""
    return _cross(x, _gather, _slice, dim, group)
