"""Changes that replace the attention function of a model, for features to declare."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ds_npu.features.declaration import Change
from ds_npu.models.attention_function import modules_with_config


def exchanges_of_attention(model: nn.Module, whose: str, make: Callable[[], None]) -> tuple[Change, ...]:
    """Change the attention of ``model`` to the one that ``whose`` describes.

    There is one change for each module with a config; the first one makes them all.
    """
    names = [name for name, _ in modules_with_config(model)]
    what = f"config: attention is {whose}"
    return tuple(Change("sets", name, what, None if index else make) for index, name in enumerate(names))
