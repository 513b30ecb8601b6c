"""What DeepSpeed's ZeRO-3 writes on a parameter that it has partitioned over the data ranks."""

from __future__ import annotations

import torch

from ds_npu.models.attributes import attribute, has_attribute


def unpartitioned_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape that ``parameter`` has when ZeRO-3 has gathered it; while it is partitioned, it holds nothing."""
    shape: tuple[int, ...] | None = attribute(parameter, "ds_shape", tuple)
    return tuple(parameter.shape if shape is None else shape)


def partition(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of a ``parameter`` that was made under ``deepspeed.zero.Init``; None of any other."""
    return attribute(parameter, "ds_tensor", torch.Tensor)


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` was made under ``deepspeed.zero.Init``."""
    return has_attribute(parameter, "ds_tensor")
