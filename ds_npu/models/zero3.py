"""Attributes that DeepSpeed's ZeRO-3 writes on a parameter that it has partitioned over the data ranks."""

from __future__ import annotations

import torch

from ds_npu.models.attributes import attribute, has_attribute, remove_attributes

PREFIX, OURS = "ds_", "ds_npu"
"""Beginnings of the names of DeepSpeed's attributes, and of ds_npu's."""
OTHERS = frozenset(
    {
        "aligned_size",
        "all_gather",
        "all_gather_coalesced",
        "convert_to_zero_parameters",
        "is_external_param",
        "item",
        "nvme_swapper",
        "padding_size",
        "partition",
        "partition_gradients",
        "partition_numel",
        "reduce_gradients_at_owner",
    }
)
"""DeepSpeed's other attributes of a parameter (runtime/zero/partition_parameters.py, _convert_to_deepspeed_param)."""


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


def is_in_use(parameter: torch.Tensor) -> bool:
    """Whether ZeRO-3 has gathered ``parameter`` for a module whose forward or backward has not ended."""
    return bool(attribute(parameter, "ds_active_sub_modules", set))


def is_on_nvme(parameter: torch.Tensor) -> bool:
    """Whether ``deepspeed.zero.Init`` has written ``parameter`` to an NVMe disk, or may."""
    return attribute(parameter, "nvme_swapper", object) is not None


def forget_partition(parameter: torch.Tensor) -> None:
    """Remove all that ZeRO-3 has written on ``parameter``, which is then a plain one without elements."""
    remove_attributes(parameter, lambda name: name in OTHERS or (name.startswith(PREFIX) and not name.startswith(OURS)))
