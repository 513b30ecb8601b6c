"""torch.compile of a model whose weights or sequences are divided over ranks: refused.

A compiled forward is traced through what ds_npu puts around modules: collectives inside of autograd functions, tensors
that stand for others, state of the running batch. torch 2.13 ends in internal errors there, or leaves parts out.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from types import FunctionType
from typing import Any, NoReturn

from torch import nn

COMPILE = "compile"
KEYS = {"tensor": "weights", "context": "sequences"}
"""By the key of ``ds_npu.parallel``, what of a model it divides."""


def check_not_compiled(model: nn.Module, key: str) -> None:
    """Raise ValueError where ``model``, or a module in it, is compiled, and ``ds_npu.parallel.<key>`` divides it."""
    for name, module in model.named_modules():
        if _is_compiled(module):
            raise ValueError(_sentence(type(model).__name__, name or "the model itself", key))


def refuse_compiling(model: nn.Module, key: str) -> None:
    """Let ``compile`` of ``model``, and of each module in it, raise ValueError."""
    for name, module in model.named_modules():
        refusal = functools.partial(_refuse, type(model).__name__, name or "the model itself", key)
        vars(module).setdefault(COMPILE, refusal)


def _is_compiled(module: nn.Module) -> bool:
    # Not imported for its own sake: without it in the process, nothing is compiled.
    wrapper: Any = vars(sys.modules.get("torch._dynamo.eval_frame", sys)).get("OptimizedModule", ())
    forward = vars(module).get("forward")
    own = isinstance(forward, FunctionType) and "_torchdynamo_orig_callable" in vars(forward)
    return isinstance(module, wrapper) or vars(module).get("_compiled_call_impl") is not None or own


def _refuse(model: str, module: str, key: str, *_: Any, **__: Any) -> NoReturn:
    raise ValueError(_sentence(model, module, key))


def check_engine_may_compile(model: nn.Module, divides: Mapping[str, bool]) -> None:
    """Raise ValueError where one of ``ds_npu.parallel``'s keys ``divides`` the model of an engine."""
    for key in (key for key, divided in divides.items() if divided):
        raise ValueError(_sentence(type(model).__name__, "the engine", key))


def _sentence(model: str, module: str, key: str) -> str:
    return (
        f"torch.compile: found on {module} of {model}, whose {KEYS[key]} ds_npu.parallel.{key} divides over ranks, "
        "which a compiled forward cannot do. What to do: leave out torch.compile (model.compile, engine.compile, the "
        f"Trainer's torch_compile, accelerate's dynamo_backend), or ds_npu.parallel.{key}"
    )
