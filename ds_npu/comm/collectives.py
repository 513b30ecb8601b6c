"""Asynchronous collectives over a group of ranks, which the caller waits for: plain tensors, no gradients.

A group is a ``torch.distributed`` process group of this rank, or None for the world. In a group of one rank nothing is
copied or sent: the result is the tensor that was given.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ds_npu.comm.pending import Pending, Work

# torch 2.13 deprecates all_gather_into_tensor and reduce_scatter_tensor, torch 2.12 has no others.
_names = vars(dist)
_gather_into = _names.get("all_gather_single", dist.all_gather_into_tensor)
_scatter_into = _names.get("reduce_scatter_single", dist.reduce_scatter_tensor)


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup | None) -> Pending[torch.Tensor]:
    """Sum every rank's ``x`` in place. Raises ValueError where it is not contiguous."""
    if not x.is_contiguous():
        raise ValueError(f"all_reduce works in place and needs a contiguous tensor; found strides {x.stride()}")
    if dist.get_world_size(group) == 1:
        return Pending(x, None)
    return Pending(x, dist.all_reduce(x, group=group, async_op=True))


def gather_parts(parts: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup | None) -> Pending[torch.Tensor]:
    """Gather every rank's ``x`` into ``parts`` [ranks, *x.shape], which is contiguous."""
    x = x.contiguous()
    return Pending(parts, _gather_into(parts.flatten(0, 1), x, group=group, async_op=True), sent=x)


def gather_into(whole: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup | None) -> Work:
    """Gather every rank's ``x`` into ``whole``, one after the other; both contiguous, and kept by the caller.

    Any number of streams may wait for it: each ``wait`` makes the stream wait that is current then.
    """
    work: Work = _gather_into(whole, x, group=group, async_op=True)
    return work


def scatter_parts(mine: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup | None) -> Pending[torch.Tensor]:
    """Sum every rank's ``parts[r]`` into ``mine`` of rank r; both contiguous, ``parts`` [ranks, *mine.shape]."""
    return Pending(mine, _scatter_into(mine, parts.flatten(0, 1), group=group, async_op=True), sent=parts)


def all_gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> Pending[torch.Tensor]:
    """Concatenate every rank's ``x`` (all of one shape) along ``dim``, in the order of the ranks.

    The parts are received in the order of the ranks. That is the result where all dims before ``dim`` are 1; elsewhere
    ``wait`` copies once.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return Pending(x, None)
    dim %= x.dim()
    parts = x.new_empty(size, *x.shape)
    return Pending(parts, gather_parts(parts, x, group), lambda whole: whole.movedim(0, dim).flatten(dim, dim + 1))


def reduce_scatter(x: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> Pending[torch.Tensor]:
    """Sum every rank's ``x``; each rank gets its part of ``dim``, in the order of the ranks.

    ``x`` is copied first where a dim before ``dim`` is not 1 (a rank's part has to be contiguous). Raises
    ValueError where the ranks do not divide ``dim``.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return Pending(x, None)
    dim %= x.dim()
    if x.shape[dim] % size:
        raise ValueError(f"dim {dim} of shape {tuple(x.shape)} does not divide by the {size} ranks of the group")
    parts = torch.unflatten(x, dim, (size, -1)).movedim(dim, 0).contiguous()
    return scatter_parts(x.new_empty(parts.shape[1:]), parts, group)


def exchange_rows(
    x: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
) -> Pending[torch.Tensor]:
    """Send ``sent[r]`` rows of ``x`` to each rank r, in the order of the ranks; rows may have any shape.

    ``received[r]`` rows come from rank r, in the same order (all-to-all with uneven parts).
    """
    if dist.get_world_size(group) == 1:
        return Pending(x, None)
    rows = x.new_empty(sum(received), *x.shape[1:])
    x = x.contiguous()
    work = dist.all_to_all_single(rows, x, list(received), list(sent), group=group, async_op=True)
    return Pending(rows, work, sent=x)
