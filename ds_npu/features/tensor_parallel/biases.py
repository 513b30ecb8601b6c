"""Numbers for each head outside of attention's linears (ALiBi, sinks): each tensor rank has those of its heads."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ds_npu.models.attributes import with_plain_weights
from ds_npu.parallel.runtime.forward_wraps import Forward, Level, wrap_forward

BIASES = ("alibi", "position_bias")
"""Arguments of attentions in transformers that are biases of the scores of all heads."""


def takes_biases(attention: nn.Module) -> bool:
    """Whether the forward of ``attention`` has an argument for biases of all heads."""
    return any(name in inspect.signature(attention.forward).parameters for name in BIASES)


def take_own_biases(attention: nn.Module, heads: int, own: range) -> None:
    """Make the forward of ``attention`` reduce the biases of all ``heads`` that it is given to its ``own`` heads.

    Biases are [heads, S, S], [B * heads, S, S] or [B, heads, S, S], where sizes may be 1.
    """
    signature = inspect.signature(attention.forward)

    def of_own(bias: torch.Tensor) -> torch.Tensor:
        if bias.dim() == 4:
            return bias if bias.shape[1] == 1 else bias[:, own.start : own.stop]
        by_head = torch.unflatten(bias, 0, (-1, heads))
        return by_head[:, own.start : own.stop].flatten(0, 1)

    def with_own(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for name in BIASES:
            if isinstance(bound.arguments.get(name), torch.Tensor):
                bound.arguments[name] = of_own(bound.arguments[name])
        return forward(*bound.args, **bound.kwargs)

    wrap_forward(attention, with_own, Level.REGION)


def use_own_numbers(attention: nn.Module, names: Sequence[str]) -> None:
    """Make the forward of ``attention`` find its shards of the parameters ``names`` as plain tensors.

    Its code computes with them, which the guard of a sharded parameter refuses.
    """

    def with_shards(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        with with_plain_weights(attention, names):
            return forward(*args, **kwargs)

    wrap_forward(attention, with_shards, Level.REGION)
