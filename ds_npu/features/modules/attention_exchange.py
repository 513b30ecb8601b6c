"""The exchange of a model's attention, as changes that features declare."""

from __future__ import annotations

from functools import partial

from torch import nn

from ds_npu.features.declaration import Change
from ds_npu.models.attention_function import Implementation, modules_with_config, use_attention


def exchanges_of_attention(
    model: nn.Module, whose: str, implementation: Implementation | None = None
) -> tuple[Change, ...]:
    """Changes that give ``model`` the attention of ``implementation`` (None: ds_npu's); ``whose`` names it."""
    make = partial(use_attention, model, implementation)
    names = [name for name, _ in modules_with_config(model)]
    what = f"config: attention is {whose}"
    return tuple(Change("sets", name, what, None if index else make) for index, name in enumerate(names))
