"""Replacements for names of the Hugging Face Trainer: checkpoints, and label smoothing.

Read in transformers 5.23. On SIGTERM (``enable_jit_checkpoint``) all ranks begin a checkpoint at the end of one step.
In transformers a rank learns of the signal by itself, and saves at the next of four points (trainer_jit_checkpoint.py).
Ranks that choose different ones wait for each other for ever; and before ``optimizer.step()`` DeepSpeed has stepped
already, in accelerate's ``backward``, so that the checkpoint would name the step before the one whose weights it holds.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_npu.engine.checkpoints.running_saves import are_saved_in
from ds_npu.engine.clients.accelerate import Function, grid
from ds_npu.features.chunked_loss.chunked_model import smoothed


def agree_on_saving(original: Function) -> Function:
    """For the callback at the end of a step or an epoch: all ranks save there if one of them got the signal."""

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


def keep_whole_checkpoints(original: Function) -> Function:
    """For ``rotate_checkpoints``: with a limit of 1 nothing is removed until the newest checkpoint is on the disk."""

    @functools.wraps(original)
    def rotate(output_dir: str, save_total_limit: int | None = None, *args: Any, **kwargs: Any) -> None:
        # With a limit of two or more the checkpoint before is kept, and each save waits until that one is whole.
        if save_total_limit != 1 or are_saved_in(Path(output_dir)):
            original(output_dir, save_total_limit, *args, **kwargs)

    return rotate


def save_later(original: Function) -> Function:
    """For a callback within a step: it does nothing, as the end of the step saves."""

    @functools.wraps(original)
    def passed(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if grid() is None else None

    return passed


def save_on_all_ranks(original: Function) -> Function:
    """For ``execute_jit_checkpoint``: only the ranks that write the checkpoint mark its folder as incomplete."""

    @functools.wraps(original)
    def saved(self: Any) -> None:
        if grid() is None or self.trainer.args.should_save:
            original(self)
            return
        self.is_checkpoint_requested = False
        self.trainer._save_checkpoint(self.trainer.model, trial=None)

    return saved


def compute_loss(original: Function) -> Function:
    """For ``Trainer.compute_loss``: where no logits exist, the model's own loss smooths its targets.

    The Trainer takes the labels out of a batch, and computes the smoothed loss of the logits that the model returns.
    Here the model is given the labels, as without smoothing.
    """

    @functools.wraps(original)
    def computed(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        smoother = self.label_smoother
        if smoother is None or self.compute_loss_func is not None:
            return original(self, model, *args, **kwargs)
        with smoothed(model, smoother.epsilon) as is_done_here:
            self.label_smoother = None if is_done_here else smoother
            try:
                return original(self, model, *args, **kwargs)
            finally:
                self.label_smoother = smoother

    return computed
