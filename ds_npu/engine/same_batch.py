"""Tensor ranks must be given the same batch: looked at once, at the first forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves


def check_first_batch(model: nn.Module, group: Any, global_ranks: list[int]) -> None:
    """Let the first forward of ``model`` raise RuntimeError where the ranks of ``group`` were given other tensors."""

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()
        mine = [_described(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        all_of_them: list[Any] = [None] * len(global_ranks)
        dist.all_gather_object(all_of_them, mine, group=group)
        for rank, theirs in zip(global_ranks, all_of_them, strict=True):
            if theirs != all_of_them[0]:
                raise RuntimeError(
                    f"ds_npu.parallel.tensor is {len(global_ranks)}, and its ranks were given different batches: rank "
                    f"{rank} has {theirs} and rank {global_ranks[0]} has {all_of_them[0]} (shape, sum). Tensor ranks "
                    "share each sample: draw it by engine.topology.rank('dp') of engine.topology.size('dp'), not by "
                    "the global rank, or let deepspeed.initialize(training_data=...) make the loader"
                )

    handle = model.register_forward_pre_hook(check, with_kwargs=True)


def _described(tensor: torch.Tensor) -> tuple[tuple[int, ...], float]:
    # Waits for the device, once in a run.
    return tuple(tensor.shape), tensor.detach().cpu().double().sum().item()
