"""Checkpoints of the Hugging Face Trainer on SIGTERM (``enable_jit_checkpoint``), which all ranks begin at one place.

Each rank learns of the signal by itself, at any time, and saves at the next of four places in a step
(trainer_jit_checkpoint.py of transformers 5.23). Ranks that choose different places wait for each other for ever; and
before ``optimizer.step()`` DeepSpeed has stepped already, in accelerate's ``backward``, so that the checkpoint would
name the step before the one whose weights it holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ds_npu.engine.clients.accelerate import grid

Function = Callable[..., Any]


def agree_on_saving(original: Function) -> Function:
    """For the place at the end of a step or an epoch: all ranks save there if one of them was told to."""

    @functools.wraps(original)
    def agreed(self: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        manager = self.jit_manager
        if manager is not None and grid() is not None:
            # The Trainer has waited for the device in this step, for the norm of the gradient.
            asked = torch.tensor(int(manager.is_checkpoint_requested), device=args.device)
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
            manager.is_checkpoint_requested = bool(asked.item())
        return original(self, args, *rest, **kwargs)

    return agreed


def save_later(original: Function) -> Function:
    """For a place within a step: the end of the step comes."""

    @functools.wraps(original)
    def passed(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if grid() is None else None

    return passed


def save_on_all_ranks(original: Function) -> Function:
    """For the saving itself: the ranks that write the checkpoint mark its folder as incomplete, and no other."""

    @functools.wraps(original)
    def saved(self: Any) -> None:
        if grid() is None or self.trainer.args.should_save:
            original(self)
            return
        self.is_checkpoint_requested = False
        self.trainer._save_checkpoint(self.trainer.model, trial=None)

    return saved
