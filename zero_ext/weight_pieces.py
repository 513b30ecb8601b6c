"""The elements of each weight's gradient, and of its optimizer state, that this rank holds, for any stage of ZeRO.

Read from DeepSpeed 0.19.8, runtime. Gradients are read between their reduction and a step, state behind a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_npu.zero_ext.bucketed_state import RUNS
from ds_npu.zero_ext.bucketed_zero import BUCKETED
from ds_npu.zero_ext.optimizer_layout import FlatRun, OptimizerLayout, layout_of_optimizer
from ds_npu.zero_ext.skipped_steps import reduced_gradients

MASTER = "master"
"""The name of the float32 weights among the states."""


class WeightPiece(NamedTuple):
    """Elements, one after the other in flat order, of the gradient or of one state of a weight's part."""

    weight: nn.Parameter
    first: int
    values: torch.Tensor
    state: str = ""


def why_unread(optimizer: Any, weights: Sequence[nn.Parameter]) -> str | None:
    """Why gradients and state of ``optimizer`` cannot be read by weight, in words; None where they can."""
    if optimizer is None:
        return "the engine has no optimizer"
    if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
        return "its gradients and state are offloaded (zero_optimization.offload_optimizer)"
    known = layout_of_optimizer(optimizer, weights) is not None
    return None if known else f"it is not known what {type(optimizer).__name__} holds where"


def gradient_pieces(optimizer: Any, weights: Sequence[nn.Parameter]) -> Iterator[WeightPiece]:
    """The reduced gradients of ``weights`` that this rank has; without ZeRO whole ones."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizer_Stage3):
        layout = layout_of_optimizer(optimizer, weights)
        runs = {} if layout is None else {id(weight): held_runs(optimizer, layout, weight) for weight in weights}
        for weight, gradient in reduced_gradients(optimizer):
            # A weight has a gradient for each of its runs, in their order.
            if (run := next(runs.get(id(weight), iter(())), None)) is not None:
                yield WeightPiece(weight, run.first, gradient.reshape(-1)[: run.numel])
    elif isinstance(optimizer, BF16_Optimizer):
        yield from (WeightPiece(weight, 0, gradient) for weight, gradient in reduced_gradients(optimizer))
    else:
        for weight in weights:
            if weight.grad is not None:
                yield WeightPiece(weight, 0, weight.grad)


def state_pieces(optimizer: Any, weights: Sequence[nn.Parameter]) -> Iterator[WeightPiece]:
    """The float32 masters of ``weights``, where there are some, and the states of their inner optimizer."""
    layout = layout_of_optimizer(optimizer, weights)
    if layout is None:
        return
    for weight in weights:
        for run in held_runs(optimizer, layout, weight):
            flat = layout.flats[run.flat]
            states = {} if layout.values is None else {MASTER: flat}
            states |= layout.inner.state.get(flat, {})
            for key, value in states.items():
                if isinstance(value, torch.Tensor) and value.shape == flat.shape:
                    part = value.detach().reshape(-1)[run.start : run.start + run.numel]
                    yield WeightPiece(weight, run.first, part, key)


def held_runs(optimizer: Any, layout: OptimizerLayout, weight: nn.Parameter) -> Iterator[FlatRun]:
    """The runs of ``weight`` on this rank: several where partitions are parts of buckets, one or none elsewhere."""
    if BUCKETED.get(optimizer) is not None and (bucketed := RUNS.get(weight)) is not None:
        groups = enumerate(optimizer.bit16_groups)
        index = next(index for index, group in groups if any(each is weight for each in group))
        for run in bucketed:
            yield FlatRun(index, run.start, run.first, run.numel, index, (index,))
    elif (own := layout.runs.get(id(weight))) is not None:
        yield own
