"""Hugging Face's activation checkpointing of a sharded model: blocks are recomputed in their forward's MicroBatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ds_npu.models.attributes import attribute, set_attribute
from ds_npu.parallel.runtime.forward_wraps import Level, P, R, wrap_forward
from ds_npu.parallel.runtime.micro_batch import closing_over_micro_batch

CHECKPOINT = "_gradient_checkpointing_func"
"""The attribute of a block that is its checkpoint function (transformers 5, GradientCheckpointingLayer).

The block calls it with the forward of its class, inside of all wraps of the forward of this one block.
"""


class ClosingCheckpoint:
    """A checkpoint function that passes ``checkpoint`` a function that closes over the forward's MicroBatch."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(closing_over_micro_batch(function), *args, **kwargs)


def recompute_in_micro_batch(block: nn.Module) -> None:
    """Replace the checkpoint function of ``block``, whenever transformers has set one, by a ClosingCheckpoint."""

    def run(forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        checkpoint = attribute(block, CHECKPOINT, object)
        if callable(checkpoint) and not isinstance(checkpoint, ClosingCheckpoint):
            set_attribute(block, CHECKPOINT, ClosingCheckpoint(checkpoint))
        return forward(*args, **kwargs)

    wrap_forward(block, run, Level.RECOMPUTE)
