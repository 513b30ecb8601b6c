"""What a split model refuses, since it would silently do it with one rank's part of the weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ds_npu.parallel.tensor.sharding import sharding_of

SAVE = "save_pretrained"
COPY = "__deepcopy__"


def refuse_parts(model: nn.Module) -> None:
    """Let ``model.save_pretrained`` take whole weights only, and ``copy.deepcopy(model)`` nothing."""
    model.__dict__[COPY] = functools.partial(_no_copy, model)
    if SAVE in dir(type(model)):
        model.__dict__[SAVE] = functools.partial(_save_whole, model, model.save_pretrained)


def _no_copy(model: nn.Module, memory: dict[int, Any]) -> None:
    # Forwards of single modules, which are closures, would still be those of the original's modules.
    raise RuntimeError(
        f"{type(model).__name__} is split over tensor ranks and cannot be copied: copy it before "
        "deepspeed.initialize, and give the copy to an engine of its own"
    )


def _save_whole(
    model: nn.Module,
    save: Any,
    folder: Any,
    *args: Any,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    **more: Any,
) -> Any:
    given = dict(model.named_parameters()) if state_dict is None else state_dict
    for name, parameter in model.named_parameters():
        sharding = sharding_of(parameter)
        if sharding is not None and name in given and given[name].shape[sharding.dim] != sharding.size:
            raise RuntimeError(
                f"save_pretrained({str(folder)!r}) would write one tensor rank's part of {name}, "
                f"{tuple(given[name].shape)} of {sharding.size} along dim {sharding.dim}, as if it were the whole. "
                "What to do: call engine.save_pretrained(folder), on every rank"
            )
    return save(folder, *args, state_dict=state_dict, **more)
