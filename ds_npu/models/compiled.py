"""torch.compile of a model whose weights or sequences are sharded over ranks: refused.

A compiled forward is traced through what ds_npu puts around modules: collectives inside of autograd functions, tensors
that stand for others, state of the current batch. torch 2.13 ends in internal errors there, or leaves parts out.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import FunctionType
from typing import NoReturn

from torch import nn

from ds_npu.models.attributes import attribute, has_attribute, set_attribute

COMPILE = "compile"
SHARDED_BY = {"tensor": "weights", "context": "sequences"}
"""The part of a model that each key of ``ds_npu.parallel`` shards."""


def check_not_compiled(model: nn.Module, key: str) -> None:
    """Raise ValueError where ``model``, which ``ds_npu.parallel.<key>`` is to shard, or a module in it, is compiled."""
    for name, module in model.named_modules():
        if _is_compiled(module):
            _refuse(type(model).__name__, name or "the model itself", key)


def refuse_compiling(model: nn.Module, key: str) -> None:
    """Make ``compile`` of ``model``, and of each module in it, raise ValueError."""
    for name, module in model.named_modules():
        refusal = functools.partial(_refuse, type(model).__name__, name or "the model itself", key)
        if not has_attribute(module, COMPILE):
            set_attribute(module, COMPILE, refusal)


def _is_compiled(module: nn.Module) -> bool:
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
