"""Guards a model of which a rank holds a part: save_pretrained writes whole weights, or nothing; no copies are made."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import nn

from ds_npu.models.attributes import attribute, set_attribute
from ds_npu.models.hugging_face_model import is_hugging_face, transformers_module
from ds_npu.parallel.runtime.placement import placement_of

SAVE = "save_pretrained"
Check = Callable[[str, Mapping[str, torch.Tensor] | None, bool], None]
"""``check(folder, weights, writes)`` raises to refuse: ``weights`` are to be written (None: the model's own), by a
process that writes them or one that takes part only."""


@runtime_checkable
class _Saves(Protocol):
    save_pretrained: Callable[..., None]


class GuardedSave:
    """The ``save_pretrained`` of one ``model``: after all ``checks``, the plain model writes weights it is given."""

    def __init__(self, model: nn.Module, save: Callable[..., None]) -> None:
        self.model, self.save, self.checks = model, save, list[Check]()

    def __call__(
        self,
        folder: str | os.PathLike[str],
        *args: Any,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        **more: Any,
    ) -> None:
        for check in self.checks:
            check(str(folder), state_dict, bool(more.get("is_main_process", True)))
        if state_dict is None:
            self.save(folder, *args, **more)
            return
        plain = writer(self.model)
        save = self.save if plain is self.model else plain.save_pretrained
        save(folder, *args, state_dict=dict(state_dict), **more)


def writer(model: Any) -> Any:
    """The plain model of ``model``'s config on the meta device, whose save_pretrained takes whole weights.

    ``model`` itself where it is not transformers', or holds adapters.
    """
    if not is_hugging_face(model) or model._hf_peft_config_loaded:
        return model
    model_class: Any = type(model)
    with torch.device("meta"), transformers_module("modeling_utils").set_zero3_state():
        plain = model_class._from_config(copy.deepcopy(model.config), dtype=model.dtype, attn_implementation="eager")
    # transformers reverts these on saving; without them, the conversions of the model's family.
    plain._weight_conversions = attribute(model, "_weight_conversions", list)
    if model.can_generate():
        plain.generation_config = model.generation_config
    return plain


def check_before_saving(model: nn.Module, check: Check) -> None:
    """Make ``model.save_pretrained``, if there is one, call ``check`` first."""
    guarded = attribute(model, SAVE, GuardedSave)
    if guarded is None:
        if SAVE not in dir(type(model)) or not isinstance(model, _Saves):
            return
        guarded = GuardedSave(model, model.save_pretrained)
        set_attribute(model, SAVE, guarded)
    if check not in guarded.checks:
        guarded.checks.append(check)


def refuse_saving_shards(model: nn.Module) -> None:
    """Make ``copy.deepcopy(model)``, and ``model.save_pretrained`` of weight shards, raise RuntimeError."""
    refuse_copies(model)
    check_before_saving(model, functools.partial(_check_whole, model))


def refuse_copies(model: nn.Module) -> None:
    """Make ``copy.deepcopy(model)`` raise RuntimeError."""
    # A copy's forwards, which are closures, would call the modules of the original.
    set_attribute(model, "__deepcopy__", functools.partial(_no_copy, type(model).__name__))


def _no_copy(model: str, memory: dict[int, object]) -> NoReturn:
    raise RuntimeError(
        f"{model} is sharded over ranks and cannot be copied: copy it before "
        "deepspeed.initialize, and give the copy to an engine of its own"
    )


def _check_whole(
    model: nn.Module, folder: str, state_dict: Mapping[str, torch.Tensor] | None, is_main_process: bool
) -> None:
    given = dict(model.named_parameters()) if state_dict is None else state_dict
    if not given and is_main_process:
        raise RuntimeError(
            f"save_pretrained({folder!r}) was given no weights: global rank 0 alone holds the whole ones. "
            "What to do: save on global rank 0 only (is_main_process; for the Trainer, save_on_each_node=False)"
        )
    for name, parameter in model.named_parameters():
        for sharding in placement_of(parameter).sharded.values():
            if name in given and given[name].shape[sharding.dim] != sharding.size:
                raise RuntimeError(
                    f"save_pretrained({folder!r}) would write one rank's part of {name}, "
                    f"{tuple(given[name].shape)} of {sharding.size} along dim {sharding.dim}, as if it were the whole. "
                    "What to do: call engine.save_pretrained(folder), on every rank; with accelerate, pass "
                    "state_dict=accelerator.get_state_dict(model), which every rank calls"
                )
