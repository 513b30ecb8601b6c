"""Layers of linear attention in transformers' models, by class, and why one of them cannot be computed here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum

from torch import nn

from ds_npu.models.attributes import attribute


class LinearAttention(Enum):
    """How a layer computes linear attention; its parts have the names that transformers' class gives them."""

    GATED_DELTA = "gated delta net"
    MAMBA = "Mamba"
    MAMBA_2 = "Mamba 2"
    SHORT_CONVOLUTION = "gated short convolution"
    """A layer that mixes tokens by its convolution alone."""


CLASSES = {
    LinearAttention.GATED_DELTA: re.compile(r"^(Qwen3(Next|_5|_5Moe)|Qwen4ExpText|OlmoHybrid)GatedDeltaNet$"),
    LinearAttention.MAMBA: re.compile(r"^(Mamba|FalconMamba|JambaMamba)Mixer$"),
    LinearAttention.MAMBA_2: re.compile(
        r"^(Mamba2Mixer|BambaMixer|FalconH1Mixer|GraniteMoeHybridMambaLayer|NemotronHMamba2Mixer)$"
    ),
    LinearAttention.SHORT_CONVOLUTION: re.compile(r"^Lfm(2|2Moe|3)ShortConv$"),
}
"""The class names of transformers' layers of each kind."""
INPUTS = re.compile(r"^(in_proj(_(qkvz|ba|qkv|z|b|a))?|[qkvabg]_proj)$")
OUTPUTS = ("out_proj", "o_proj")
"""The names of the linears into a layer and out of it."""
NORMS, CONVOLUTIONS, ACTIVATION = ("norm", "o_norm"), ("conv1d", "conv"), "act"
"""The names of a layer's other modules."""


def linear_attention_of(module: nn.Module) -> LinearAttention | None:
    """The kind of linear attention that the layer ``module`` computes; None for any other module."""
    if not type(module).__module__.startswith("transformers.models."):
        return None
    return next((kind for kind, names in CLASSES.items() if names.match(type(module).__name__)), None)


def linear_attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of linear attention in ``model``, by name."""
    return {name: each for name, each in model.named_modules() if linear_attention_of(each) is not None}


def part_of(layer: nn.Module, *names: str) -> nn.Module:
    """The part of ``layer`` that has one of ``names``."""
    parts = dict(layer.named_children())
    return next(parts[name] for name in names if name in parts)


def misfits(layer: nn.Module) -> Iterator[str]:
    """Yield why ds_npu does not compute ``layer``, in words that follow its name."""
    kind = linear_attention_of(layer)
    if kind is LinearAttention.MAMBA:
        yield f"is {kind.value}, whose states ds_npu does not compute: it does those of Mamba 2"
        return
    for name, part in layer.named_children():
        if not INPUTS.match(name) and name not in (*OUTPUTS, *NORMS, *CONVOLUTIONS, ACTIVATION):
            yield f"holds {name} ({type(part).__name__}), and nothing says what it computes"
    convolution = part_of(layer, *CONVOLUTIONS)
    if type(convolution) is not nn.Conv1d:
        yield f"holds a {type(convolution).__name__} in the place of its convolution"
    is_short = kind is LinearAttention.SHORT_CONVOLUTION
    if not is_short and attribute(layer, "activation", str) not in ("silu", "swish"):
        yield f"has the activation {attribute(layer, 'activation', object)}: silu is computed"
    inputs = (part for name, part in layer.named_children() if INPUTS.match(name))
    if any(name.rpartition(".")[2] == "bias" for each in inputs for name, _ in each.named_parameters()):
        yield "has a bias in in_proj, which padding adds to what its convolution sees"
