"""The norm of all gradients of a model on tensor, expert and pipeline ranks, and clipping by it, without ZeRO.

DeepSpeed's own (0.19.8 runtime/utils.py::clip_grad_norm_) counts parameters that tensor ranks hold alike on model
rank 0 only, so it leaves out every stage of a pipeline but the first, counts weights that stages share twice, and
keeps the norm to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_npu.ops.precision import accumulation_dtype
from ds_npu.parallel.runtime.placement import placement_of
from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute
from ds_npu.topology.degrees import Axis
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.method_wraps import MethodLevel, wrap_method

REPLICATED = TensorAttribute[bool]("ds_pipe_replicated")
"""DeepSpeed's mark of a weight that pipeline stages share, on all stages but the one that counts it."""
EXPERT_MODEL_AXES: tuple[Axis, ...] = ("ep", "etp")
"""Axes of the expert view along which ranks hold other experts, or other shards of them."""
EPSILON = 1e-6
"""DeepSpeed's and torch's own, against division by zero."""


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter], max_norm: float, topology: Topology, model_axes: tuple[Axis, ...]
) -> torch.Tensor:
    """Scale every gradient so that their joint 2-norm is at most ``max_norm``.

    Returns the norm before that, a scalar. ``model_axes``: the axes of the dense view along which ranks hold other
    weights of the model. The norm is summed in float32, in float64 where there are float64 gradients. Nothing waits
    for the device.
    """
    every = list(parameters)
    held = [(parameter, parameter.grad) for parameter in every if parameter.grad is not None]
    # A pipeline stage in which nothing is trained takes part in the sum all the same.
    norm = joint_norm(held, topology, model_axes, every[0] if every else None)
    factor = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    for _, gradient in held:
        gradient.mul_(factor)
    return norm


def joint_norm(
    held: Sequence[tuple[torch.nn.Parameter, torch.Tensor]],
    topology: Topology,
    model_axes: tuple[Axis, ...],
    like: torch.Tensor | None = None,
) -> torch.Tensor:
    """The 2-norm, a scalar, of the gradients of all weights of the model: ``held`` are this rank's, with its gradients.

    ``model_axes`` and precision are as in ``clip_gradients``. ``like``: a tensor with the gradients' dtype and device,
    for a rank that holds none.
    """
    sample = held[0][1] if held else like
    if sample is None:
        return torch.zeros(())
    dtype = accumulation_dtype(sample.dtype)
    dense, experts = (torch.zeros((), dtype=dtype, device=sample.device) for _ in range(2))
    for parameter, gradient in held:
        placement = placement_of(parameter)
        axes, total = (EXPERT_MODEL_AXES, experts) if placement.is_expert else (model_axes, dense)
        if placement.counts_at(topology.coordinates, axes) and not REPLICATED.get(parameter):
            total += torch.linalg.vector_norm(gradient, dtype=dtype).square()
    if topology.size(*EXPERT_MODEL_AXES) > 1:
        dist.all_reduce(experts, group=topology.group(*EXPERT_MODEL_AXES))
        # Every tensor rank of a stage has this sum; one of them adds it.
        if topology.rank("tp") == 0:
            dense += experts
    dist.all_reduce(dense, group=topology.group(*model_axes))
    return dense.sqrt()


def take_joint_norm(optimizer: Any, topology: Topology, model_axes: tuple[Axis, ...]) -> None:
    """Make ``optimizer``, a FP16_UnfusedOptimizer, clip by the norm of all gradients.

    Its step (DeepSpeed 0.19.8 runtime/fp16/unfused_optimizer.py) takes the norm of gradients that carry no marks: it
    leaves out experts, and what tensor ranks but the first hold. Then it copies all to float32 (times the loss scale)
    and calls ``unscale_and_clip_grads`` with the norm.
    """

    def unscale_and_clip_grads(clip: Callable[..., Any], total_norm: Any, apply_scale: bool = True) -> Any:
        groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        held = [(narrow, wide.grad) for each in groups for narrow, wide in zip(*each, strict=True)]
        # The loss scale is the host's, which waits for the norm in any case.
        optimizer._global_grad_norm = joint_norm(held, topology, model_axes).item()
        return clip(optimizer._global_grad_norm, apply_scale)

    wrap_method(optimizer, "unscale_and_clip_grads", unscale_and_clip_grads, MethodLevel.CORRECTION)


def count_on_every_rank(optimizer: Any) -> None:
    """Make ``optimizer``, a BF16_Optimizer, take its norm where a rank counts no dense gradient, too.

    Tensor ranks but the first do not count what all of them hold alike; where they hold nothing else, as with experts
    in a model that is otherwise whole, DeepSpeed stacks an empty list (0.19.8 runtime/utils.py:956).
    """

    def get_grads_for_norm(grads_for_norm: Callable[[bool], Any], for_clipping: bool = False) -> Any:
        found = grads_for_norm(for_clipping)
        if for_clipping:
            return found
        dense, experts = found
        return dense or [optimizer.fp32_groups_gradients[0][0].new_zeros(1)], experts

    wrap_method(optimizer, "get_grads_for_norm", get_grads_for_norm, MethodLevel.CORRECTION)
