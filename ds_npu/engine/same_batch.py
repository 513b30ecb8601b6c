"""Tensor and context ranks must be given the same batch: looked at once, at the first forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_npu.features.context_parallel.sharded_sequences import has_sharded_sequences
from ds_npu.parallel.forward_wraps import disable_tracing
from ds_npu.topology.degrees import Axis
from ds_npu.topology.topology import Topology

KEYS: dict[Axis, str] = {"tp": "tensor", "cp": "context"}


def check_first_batch(model: nn.Module, topology: Topology) -> None:
    """Let the first forward of ``model`` raise RuntimeError where ranks that share samples were given other tensors.

    Context ranks share them if ds_npu divides the sequences; else the script gives each of them other tokens.
    """
    axes: list[Axis] = [
        axis for axis in KEYS if topology.size(axis) > 1 and (axis == "tp" or has_sharded_sequences(model))
    ]
    if not axes:
        return

    @disable_tracing
    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()
        mine = [_described(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for axis in axes:
            _compare(mine, axis, topology)

    handle = model.register_forward_pre_hook(check, with_kwargs=True)


def _compare(mine: list[Any], axis: Axis, topology: Topology) -> None:
    ranks = topology.ranks(axis)
    all_of_them: list[Any] = [None] * len(ranks)
    dist.all_gather_object(all_of_them, mine, group=topology.group(axis))
    for rank, theirs in zip(ranks, all_of_them, strict=True):
        if theirs != all_of_them[0]:
            raise RuntimeError(
                f"ds_npu.parallel.{KEYS[axis]} is {len(ranks)}, and its ranks were given different batches: rank "
                f"{rank} has {theirs} and rank {ranks[0]} has {all_of_them[0]} (shape, sum). Tensor and context ranks "
                "share each sample. What to do: draw it by engine.topology.rank('dp') of engine.topology.size('dp'), "
                "not by the global rank, or let deepspeed.initialize(training_data=...), accelerate or the Hugging "
                "Face Trainer make the loader"
            )


def _described(tensor: torch.Tensor) -> tuple[tuple[int, ...], float]:
    # Waits for the device, once in a run.
    return tuple(tensor.shape), tensor.detach().cpu().double().sum().item()
