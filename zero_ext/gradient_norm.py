"""The norm of all gradients of a model spread over tensor and pipeline ranks, and clipping by it, without ZeRO.

DeepSpeed's own (0.19.8 runtime/utils.py::clip_grad_norm_) counts parameters that tensor ranks hold alike on model
rank 0 only, so it leaves out every stage of a pipeline but the first, counts weights that stages share twice, and
keeps the norm to itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

EPSILON = 1e-6
"""DeepSpeed's and torch's own, against division by zero."""


def counts_here(parameter: torch.nn.Parameter, tensor_rank: int) -> bool:
    """Whether this rank adds ``parameter``'s gradient to the norm: one of the ranks that hold it alike does."""
    marks = vars(parameter)
    if marks.get("ds_pipe_replicated"):
        return False
    return tensor_rank == 0 or bool(marks.get("tensor_model_parallel") or marks.get("model_parallel"))


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter], max_norm: float, tensor_rank: int, model_group: Any
) -> torch.Tensor:
    """Scale every gradient so that their joint 2-norm is at most ``max_norm``; return the norm from before, a scalar.

    ``model_group``: the process group of the ranks that hold other parts of the model. The norm is summed in float32,
    in float64 where there are float64 gradients. Nothing waits for the device.
    """
    held = [parameter for parameter in parameters if parameter.grad is not None]
    if not held:
        return torch.zeros(())
    wide = torch.promote_types(held[0].grad.dtype, torch.float32)  # type: ignore[union-attr]
    squares = torch.zeros((), dtype=wide, device=held[0].device)
    for parameter in held:
        if counts_here(parameter, tensor_rank):
            squares += torch.linalg.vector_norm(parameter.grad, dtype=wide).square()
    dist.all_reduce(squares, group=model_group)
    norm = squares.sqrt()
    factor = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    for parameter in held:
        parameter.grad.mul_(factor)  # type: ignore[union-attr]
    return norm
