"""Refusals of models that another library distributes, too, that are quantised, or float64 on NPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_npu.models.attributes import attribute
from ds_npu.topology.degrees import NAMES, Axis, Degrees

MODEL_AXES: tuple[Axis, ...] = ("tp", "cp", "pp")
"""Axes whose ranks share samples."""
PACKED = frozenset({"Params4bit", "Int8Params"})
"""Classes of bitsandbytes' parameters, which hold packed numbers."""


def check_whole(model: nn.Module, degrees: Degrees) -> None:
    """Raise ValueError where transformers has distributed ``model`` when it loaded it, and ``degrees`` do it again."""
    for each in model.modules():
        size = attribute(each, "_tp_size", int) or 1
        if (size > 1 or attribute(each, "_is_distributed_loading_by_transformers", bool)) and _asked(degrees):
            raise ValueError(
                f"{type(each).__name__}.from_pretrained was given distributed_config= or tp_plan= (tensor {size}), and "
                f"ds_npu.parallel asks for {_asked(degrees)}: two ways to distribute one model over the ranks. "
                f"{_what_to_do('distributed_config=, tp_plan= and tp_size=')}"
            )


def check_no_parallelism_config(sizes: dict[str, int], degrees: Degrees) -> None:
    """Raise ValueError where accelerate's ParallelismConfig has ``sizes`` > 1, and ``degrees`` distribute a model."""
    theirs = ", ".join(f"{name}_size {size}" for name, size in sizes.items() if size > 1)
    if theirs and _asked(degrees):
        raise ValueError(
            f"accelerate's ParallelismConfig asks for {theirs} (in the script, by PARALLELISM_CONFIG_* in the "
            "environment, or because the model was loaded with distributed_config= or tp_plan=), and ds_npu.parallel "
            f"for {_asked(degrees)}: two ways to distribute one model over the ranks. "
            f"{_what_to_do('the ParallelismConfig, distributed_config= and tp_plan=')}"
        )


def check_not_quantized(model: nn.Module, degrees: Degrees) -> None:
    """Raise ValueError where ``model`` is quantised, and ``degrees`` distribute it."""
    found = _quantization(model)
    if found is not None and _asked(degrees):
        raise ValueError(
            f"{type(model).__name__} is quantised ({found}), and ds_npu.parallel asks for {_asked(degrees)}: ranks can "
            "share a model whose weights are plain tensors only (QLoRA is not supported). What to do: load it without "
            "quantization_config and train LoRA on it, or leave the keys of ds_npu.parallel out"
        )


def trains_in_float64(model: nn.Module, config: Any, device: str) -> bool:
    """Whether ``model`` has float64 weights that DeepSpeed's ``config`` does not cast.

    Raises ValueError on NPUs.
    """
    if config.float16_config.enabled or config.bfloat16_config.enabled:
        return False
    wide = [name for name, weight in model.named_parameters() if weight.dtype == torch.float64]
    if wide and device == "npu":
        raise ValueError(
            f"{len(wide)} weights of {type(model).__name__} are float64 ({wide[0]} is the first), which NPUs neither "
            "multiply nor reduce over ranks. What to do: call model.float(), or set bf16.enabled"
        )
    return bool(wide)


def _asked(degrees: Degrees) -> str:
    """The axes of ``degrees`` along which ranks share a model, with their sizes, as keys of ds_npu.parallel."""
    return ", ".join(f"{NAMES[axis]} {degrees.size(axis)}" for axis in MODEL_AXES if degrees.size(axis) > 1)


def _what_to_do(theirs: str) -> str:
    return f"What to do: leave {theirs} out, or the keys of ds_npu.parallel"


def _quantization(model: nn.Module) -> str | None:
    """The setting that says that ``model``, or a model in it (PEFT's), is quantised; None without one."""
    for module in model.modules():
        # As every quantiser of transformers says it (quantizers/base.py, preprocess_model, 5.23).
        if attribute(module, "is_quantized", bool):
            return str(attribute(module, "quantization_method", object) or "is_quantized")
    packed = ((name, type(each).__name__) for name, each in model.named_parameters())
    return next((f"{name} is a {kind}" for name, kind in packed if kind in PACKED), None)
