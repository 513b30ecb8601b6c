"""The norm of all gradients of a model on tensor and pipeline ranks, and clipping by it, without ZeRO.

DeepSpeed's own (0.19.8 runtime/utils.py::clip_grad_norm_) counts parameters that tensor ranks hold alike on model
rank 0 only, so it leaves out every stage of a pipeline but the first, counts weights that stages share twice, and
keeps the norm to itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from ds_npu.ops.precision import accumulation_dtype
from ds_npu.parallel.tensor.sharding import TENSOR_PARALLEL
from ds_npu.parallel.tensor.tensor_attribute import TensorAttribute

REPLICATED = TensorAttribute[bool]("ds_pipe_replicated")
"""DeepSpeed's mark of a weight that pipeline stages share, on all stages but the one that counts it."""
SHARDED = tuple(TensorAttribute[bool](name) for name in (TENSOR_PARALLEL, "model_parallel"))
"""DeepSpeed's marks of a weight of which every model-parallel rank has a shard."""
EPSILON = 1e-6
"""DeepSpeed's and torch's own, against division by zero."""


def counts_here(parameter: torch.nn.Parameter, tensor_rank: int) -> bool:
    """Whether this rank adds ``parameter``'s gradient to the norm: of ranks with the same parameter, one does."""
    if REPLICATED.get(parameter):
        return False
    return tensor_rank == 0 or any(mark.get(parameter) for mark in SHARDED)


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter], max_norm: float, tensor_rank: int, model_group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Scale every gradient so that their joint 2-norm is at most ``max_norm``; return the norm from before, a scalar.

    ``model_group``: the process group of the ranks that hold other parts of the model. The norm is summed in float32,
    in float64 where there are float64 gradients. Nothing waits for the device.
    """
    held = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not held:
        return torch.zeros(())
    dtype = accumulation_dtype(held[0][1].dtype)
    squares = torch.zeros((), dtype=dtype, device=held[0][0].device)
    for parameter, gradient in held:
        if counts_here(parameter, tensor_rank):
            squares += torch.linalg.vector_norm(gradient, dtype=dtype).square()
    dist.all_reduce(squares, group=model_group)
    norm = squares.sqrt()
    factor = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    for _, gradient in held:
        gradient.mul_(factor)
    return norm
