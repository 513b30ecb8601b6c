"""Guards of a model of which a rank holds a part: it is saved whole or not at all, neither copied nor compiled.

A compiled forward is traced through what ds_npu puts around modules: collectives inside of autograd functions, tensors
that stand for others, state of the current batch. torch 2.13 ends in internal errors there, or leaves parts out.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import nn

from ds_npu.models.attributes import attribute, has_attribute, set_attribute
from ds_npu.models.hugging_face_model import is_hugging_face, transformers_module
from ds_npu.parallel.runtime.placement import placement_of

SAVE, COMPILE = "save_pretrained", "compile"
SHARDED_BY = {"tensor": "weights", "context": "sequences"}
"""The part of a model that each key of ``ds_npu.parallel`` shards."""
Check = Callable[[str, Mapping[str, torch.Tensor] | None, bool], None]
"""``check(folder, weights, writes)`` raises to refuse that ``weights`` (None: the model's own) are saved; ``writes``:
whether this process writes them, or only takes part."""


@runtime_checkable
class _Saves(Protocol):
    save_pretrained: Callable[..., None]


class GuardedSave:
    """The ``save_pretrained`` of one ``model``: it runs ``checks`` first.

    The plain model saves a state dict that is given.
    """

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


def check_not_compiled(model: nn.Module, key: str) -> None:
    """Raise ValueError where ``model``, which ``ds_npu.parallel.<key>`` is to shard, or a module in it, is compiled."""
    for name, module in model.named_modules():
        if is_compiled(module):
            _refuse(type(model).__name__, name or "the model itself", key)


def refuse_compiling(model: nn.Module, key: str) -> None:
    """Make ``compile`` of ``model``, and of each module in it, raise ValueError."""
    for name, module in model.named_modules():
        if not has_attribute(module, COMPILE):
            refusal = functools.partial(_refuse, type(model).__name__, name or "the model itself", key)
            set_attribute(module, COMPILE, refusal)


def is_compiled(module: nn.Module) -> bool:
    # By name: importing torch._dynamo takes seconds, and without it nothing is compiled.
    bases = ((base.__module__, base.__name__) for base in type(module).__mro__)
    is_wrapper = ("torch._dynamo.eval_frame", "OptimizedModule") in bases
    forward = attribute(module, "forward", FunctionType)
    has_compiled_forward = forward is not None and has_attribute(forward, "_torchdynamo_orig_callable")
    return is_wrapper or module._compiled_call_impl is not None or has_compiled_forward


def check_engine_may_compile(model: nn.Module, shards: Mapping[str, bool]) -> None:
    """Raise ValueError where one of the keys of ``ds_npu.parallel`` ``shards`` the model of an engine."""
    for key in (key for key, sharded in shards.items() if sharded):
        _refuse(type(model).__name__, "the engine", key)


def _refuse(model: str, module: str, key: str, *_: object, **__: object) -> NoReturn:
    raise ValueError(
        f"torch.compile: found on {module} of {model}, whose {SHARDED_BY[key]} ds_npu.parallel.{key} divides over "
        "ranks, which a compiled forward cannot do. What to do: leave out torch.compile (model.compile, "
        "engine.compile, the "
        f"Trainer's torch_compile, accelerate's dynamo_backend), or ds_npu.parallel.{key}"
    )
