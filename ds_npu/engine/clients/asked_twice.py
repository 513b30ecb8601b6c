"""Refusals of a parallelism that ds_npu's section asks for, and another library's setting as well."""

from __future__ import annotations

from torch import nn

from ds_npu.models.attributes import attribute
from ds_npu.topology.degrees import NAMES, Axis, Degrees

MODEL_AXES: tuple[Axis, ...] = ("tp", "cp", "pp")
"""Axes whose ranks share samples."""


def check_whole(model: nn.Module, degrees: Degrees) -> None:
    """Raise ValueError where transformers has distributed ``model`` when it loaded it, and ``degrees`` do it again."""
    for each in model.modules():
        size = attribute(each, "_tp_size", int) or 1
        if (size > 1 or attribute(each, "_is_distributed_loading_by_transformers", bool)) and asked(degrees):
            raise ValueError(
                f"{type(each).__name__}.from_pretrained was given distributed_config= or tp_plan= (tensor {size}), and "
                f"ds_npu.parallel asks for {asked(degrees)}: two ways to distribute one model over the ranks. "
                f"{_what_to_do('distributed_config=, tp_plan= and tp_size=')}"
            )


def check_no_parallelism_config(sizes: dict[str, int], degrees: Degrees) -> None:
    """Raise ValueError where accelerate's ParallelismConfig has ``sizes`` > 1, and ``degrees`` distribute a model."""
    theirs = ", ".join(f"{name}_size {size}" for name, size in sizes.items() if size > 1)
    if theirs and asked(degrees):
        raise ValueError(
            f"accelerate's ParallelismConfig asks for {theirs} (in the script, by PARALLELISM_CONFIG_* in the "
            "environment, or because the model was loaded with distributed_config= or tp_plan=), and ds_npu.parallel "
            f"for {asked(degrees)}: two ways to distribute one model over the ranks. "
            f"{_what_to_do('the ParallelismConfig, distributed_config= and tp_plan=')}"
        )


def asked(degrees: Degrees) -> str:
    """The axes of ``degrees`` along which ranks share a model, with their sizes, as keys of ds_npu.parallel."""
    return ", ".join(f"{NAMES[axis]} {degrees.size(axis)}" for axis in MODEL_AXES if degrees.size(axis) > 1)


def _what_to_do(theirs: str) -> str:
    return f"What to do: leave {theirs} out, or the keys of ds_npu.parallel"
