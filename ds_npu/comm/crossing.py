"""Ways for a tensor to cross between ranks that hold the same and ranks that hold parts, with their gradients.

Each is one collective forward, or none, and its conjugate backward (Megatron-LM, arXiv 1909.08053 section 3 and
2205.05198 section 4.2):

    copy             identity         / all-reduce          the same  -> used by each rank for its part
    reduce           all-reduce       / identity            summands  -> the same
    gather           all-gather       / reduce-scatter      shards    -> used by each rank for its part
    scatter_sum      reduce-scatter   / all-gather          summands  -> shards
    shard            slice            / all-gather          the same  -> shards
    collect          all-gather       / slice               shards    -> the same

"The same" means that tensor ranks hold equal values and will have equal gradients; "used by each rank for its part",
that each rank's gradient is a summand of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ds_npu.comm.collectives import all_gather, all_reduce, reduce_scatter

Crossing = Callable[[torch.Tensor, int, Any], torch.Tensor]


def _same(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    return x.view_as(x)


def _sum(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    return all_reduce(x.clone(memory_format=torch.contiguous_format), group).wait()


def _slice(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    size = x.shape[dim] // dist.get_world_size(group)
    rank = dist.get_rank() if group is None else group.rank()
    return x.narrow(dim, rank * size, size).contiguous()


def _gather(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    return all_gather(x.contiguous(), dim, group).wait()


def _scatter(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    return reduce_scatter(x.contiguous(), dim, group).wait()


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forth: Crossing, back: Crossing, dim: int, group: Any) -> torch.Tensor:
        ctx.back, ctx.dim, ctx.group = back, dim, group
        return forth(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.back(grads[0], ctx.dim, ctx.group), None, None, None, None


def copy(x: torch.Tensor, group: Any) -> torch.Tensor:
    """``x`` as it is; its gradients are summed over ``group``."""
    return _cross(x, _same, _sum, 0, group)


def reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of ``x`` over ``group``; its gradient is passed on."""
    return _cross(x, _sum, _same, 0, group)


def gather(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """The shards of ``group`` joined along ``dim``; gradients are summed and cut."""
    return _cross(x, _gather, _scatter, dim, group)


def scatter_sum(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """This rank's shard, along ``dim``, of the sum of ``x`` over ``group``; gradients are joined."""
    return _cross(x, _scatter, _gather, dim, group)


def shard(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """This rank's shard of ``x``, which all of ``group`` hold, along ``dim``; gradients are joined."""
    return _cross(x, _slice, _gather, dim, group)


def collect(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """The shards of ``group`` joined along ``dim``, for a use that is the same on every rank; its gradient is cut."""
    return _cross(x, _gather, _slice, dim, group)


def _cross(x: torch.Tensor, forth: Crossing, back: Crossing, dim: int, group: Any) -> torch.Tensor:
    function: Any = _Cross  # torch's apply has no types
    crossed: torch.Tensor = function.apply(x, forth, back, dim, group)
    return crossed
