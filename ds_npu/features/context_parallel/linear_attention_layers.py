"""Layers of linear attention whose sequences are sharded: states and halos go from context rank to context rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_npu.features.context_parallel.sharded_batch import RunningBatch, ShardedBatch
from ds_npu.features.modules.linear_attention import linear_attention_forward
from ds_npu.models.attributes import attribute
from ds_npu.models.kinds import own_shapes
from ds_npu.models.linear_attention import CONVOLUTIONS, part_of
from ds_npu.ops.linear_attention import Recurrence
from ds_npu.parallel.context.state_scan import convolved_runs, scanned_attention
from ds_npu.parallel.context.token_runs import TokenRuns
from ds_npu.parallel.runtime.forward_wraps import Level, wrap_forward


class ShardedRuns:
    """``Sequences`` over context ranks.

    This rank has runs of their tokens, and exchanges states and halos with the other ranks.
    """

    def __init__(self, batch: ShardedBatch, width: int) -> None:
        self.batch = batch
        self.runs: TokenRuns = batch.runs(width)

    @property
    def kept(self) -> torch.Tensor | None:
        return self.batch.kept

    def compute(self, mixer: Callable[..., torch.Tensor], *of_tokens: torch.Tensor) -> torch.Tensor:
        return self.runs.restored(mixer(*map(self.runs.arranged, of_tokens)), self.batch.samples)

    def convolve(self, x_PLC: torch.Tensor, convolution: nn.Module) -> torch.Tensor:
        bias = _weight(convolution, "bias") if "bias" in own_shapes(convolution) else None
        return convolved_runs(x_PLC, _weight(convolution, "weight").squeeze(1), bias, self.runs, self.batch.group)

    def attend(self, tokens: Recurrence) -> torch.Tensor:
        return scanned_attention(tokens, self.runs, self.batch.group)


def scan_states(layer: nn.Module, running_batch: RunningBatch) -> None:
    """Make ``layer`` compute this rank's tokens of the running batch, with the states of the ranks before."""
    wrap_forward(layer, partial(_scanned, layer, running_batch), Level.OPERATOR)


def _scanned(
    layer: nn.Module,
    running_batch: RunningBatch,
    forward: Callable[..., Any],
    hidden_states: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    # The mask and the documents among the arguments are those of the batch, which has them of whole sequences.
    batch = running_batch.require(f"linear attention, {type(layer).__name__},")
    if not isinstance(batch, ShardedBatch):
        return forward(hidden_states, *args, **kwargs)
    if hidden_states.shape[1] != batch.count:
        raise ValueError(
            f"ds_npu.parallel.context: {type(layer).__name__} is given {hidden_states.shape[1]} tokens of each sample; "
            f"this rank has {batch.count}"
        )
    width: int = _weight(part_of(layer, *CONVOLUTIONS), "weight").shape[-1]
    return linear_attention_forward(layer, hidden_states, ShardedRuns(batch, width))


def _weight(convolution: nn.Module, name: str) -> torch.Tensor:
    """The parameter ``name``, or what stands in its place while the layer is computed (channels of a tensor rank)."""
    own = attribute(convolution, name, torch.Tensor)
    # By its name: ZeRO-3 gathers what is read so.
    return convolution.get_parameter(name) if own is None else own
