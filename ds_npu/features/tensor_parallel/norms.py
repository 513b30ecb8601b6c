"""RMS norms over all heads of an attention, or all columns of an MLP, of which each tensor rank has a part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from ds_npu.comm.crossing import copy, reduce
from ds_npu.features.modules.rms_norms import rms_norm_arguments
from ds_npu.ops.precision import accumulation_dtype
from ds_npu.parallel.runtime.forward_wraps import replace_innermost_forward
from ds_npu.parallel.tensor.axis import TensorAxis


def norm_over_ranks(norm: nn.Module, name: str, width: int, axis: TensorAxis) -> Callable[[], None]:
    """A function that makes ``norm``, whose weight becomes a shard, divide by the root mean square over all ranks.

    ``width``: the columns of all ranks. Raises ValueError where ``norm`` computes something else than an RMS norm.
    """
    found = rms_norm_arguments(norm)
    if isinstance(found, str):
        raise ValueError(
            f"ds_npu.parallel.tensor: found {axis.size}; {name} is over all heads or columns, and {found}. What to do: "
            "give the module around it the role replicated in ds_npu.plan"
        )
    return partial(replace_innermost_forward, norm, partial(_forward, norm, width, axis, found))


def _forward(
    norm: nn.Module, width: int, axis: TensorAxis, arguments: tuple[float, float, bool], x: torch.Tensor
) -> torch.Tensor:
    """The norm of this rank's part of x [..., width / tp], in x's dtype; as ``ops.rms_norm`` accumulates."""
    eps, offset, widens = arguments
    weight = norm.get_parameter("weight")
    wide = x.to(accumulation_dtype(x.dtype))
    # Each rank adds its squares, and uses the sum for its part: its gradient is a summand, too.
    squares = copy(reduce(wide.square().sum(-1, keepdim=True), axis.group), axis.group)
    scaled = wide * (squares / width + eps).rsqrt() * (weight.to(wide.dtype) + offset)
    return scaled.to(torch.promote_types(x.dtype, weight.dtype) if widens else x.dtype)
