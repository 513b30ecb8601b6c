"""Layers of linear attention in transformers' models, by class, and why one of them cannot be computed here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum

from torch import nn

from ds_npu.models.attributes import attribute

GATED_DELTA = re.compile(r"^Qwen3(Next|_5|_5Moe)GatedDeltaNet$")
MAMBA_2 = ("Mamba2Mixer",)
PARTS = re.compile(r"^(in_proj(_(qkvz|ba|qkv|z|b|a))?|conv1d|norm|out_proj|act)$")
"""The modules that a layer holds."""


class LinearAttention(Enum):
    """How a layer computes linear attention; its parts have the names that transformers' class gives them."""

    GATED_DELTA = "gated delta net"
    MAMBA_2 = "Mamba 2"


def linear_attention_of(module: nn.Module) -> LinearAttention | None:
    """The kind of linear attention that the layer ``module`` computes; None for any other module."""
    name, origin = type(module).__name__, type(module).__module__
    if not origin.startswith("transformers.models."):
        return None
    if GATED_DELTA.match(name):
        return LinearAttention.GATED_DELTA
    return LinearAttention.MAMBA_2 if name in MAMBA_2 else None


def linear_attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of linear attention in ``model``, by name."""
    return {name: each for name, each in model.named_modules() if linear_attention_of(each) is not None}


def misfits(layer: nn.Module) -> Iterator[str]:
    """Yield why ds_npu does not compute ``layer``, in words that follow its name."""
    for name, part in layer.named_children():
        if not PARTS.match(name):
            yield f"holds {name} ({type(part).__name__}), and nothing says what it computes"
    convolution = layer.get_submodule("conv1d")
    if type(convolution) is not nn.Conv1d:
        yield f"holds a {type(convolution).__name__} in the place of its convolution"
    if attribute(layer, "activation", str) not in ("silu", "swish"):
        yield f"has the activation {attribute(layer, 'activation', object)}: silu is computed"
    if linear_attention_of(layer) is LinearAttention.MAMBA_2 and attribute(layer, "use_bias", bool):
        yield "has a bias in in_proj, which padding adds to what its convolution sees"
