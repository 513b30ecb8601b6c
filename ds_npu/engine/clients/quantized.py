"""Refusal of models whose weights are quantised, as QLoRA's are: their parts and their copies are not known here."""

from __future__ import annotations

from torch import nn

from ds_npu.engine.clients.asked_twice import asked
from ds_npu.models.attributes import attribute
from ds_npu.topology.degrees import Degrees

PACKED = frozenset({"Params4bit", "Int8Params"})
"""Classes of bitsandbytes' parameters, which hold packed numbers."""


def check_not_quantized(model: nn.Module, degrees: Degrees) -> None:
    """Raise ValueError where ``model`` is quantised, and ``degrees`` distribute it."""
    found = _quantization(model)
    if found is not None and asked(degrees):
        raise ValueError(
            f"{type(model).__name__} is quantised ({found}), and ds_npu.parallel asks for {asked(degrees)}: ranks can "
            "share a model whose weights are plain tensors only (QLoRA is not supported). What to do: load it without "
            "quantization_config and train LoRA on it, or leave the keys of ds_npu.parallel out"
        )


def _quantization(model: nn.Module) -> str | None:
    """The setting that says that ``model``, or a model in it (PEFT's), is quantised; None without one."""
    for module in model.modules():
        # As every quantiser of transformers says it (quantizers/base.py, preprocess_model, 5.23).
        if attribute(module, "is_quantized", bool):
            return str(attribute(module, "quantization_method", object) or "is_quantized")
    packed = ((name, type(each).__name__) for name, each in model.named_parameters())
    return next((f"{name} is a {kind}" for name, kind in packed if kind in PACKED), None)
