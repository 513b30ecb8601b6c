"""Wraps around the forward of single modules of a user's model, inside of the modules' hooks; classes do not change.

Each wrap has a level, and wraps of an outer level are called first: features may wrap a module in any order.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, ParamSpec, TypeVar

from torch import nn
from torch._compile import _disable_dynamo

from ds_npu.parallel.runtime.calls import Arguments
from ds_npu.parallel.runtime.marks import held

P = ParamSpec("P")
R = TypeVar("R")

Forward = Callable[..., Any]
"""The forward of some module: its parameters and its result are the module's own."""
Wrapper = Callable[..., Any]
"""``wrapper(forward, *args, **kwargs)``, called in place of ``forward(*args, **kwargs)``."""


def disable_tracing(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which torch.compile does not trace: compiled code calls it eagerly.

    torch 2.13 raises internal errors when it traces collectives in autograd functions and forwards of single modules.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    # torch.compiler.disable does the same, but imports the compiler at once.
    made: Callable[P, R] = _disable_dynamo(run)
    return made


class Level(IntEnum):
    """The purpose of a wrap, outermost first."""

    MODEL = 0
    """Rules for the whole forward of the model: how its weights may be read."""
    OVERLAP = 1
    """Outside of all computations of a module: its result may exist already, or be computed later."""
    SWAP = 2
    """Outside of RECOMPUTE: only the innermost hooks on saved tensors apply, and a swap within a recomputation would
    keep the tensors that the recomputation frees."""
    RECOMPUTE = 3
    SEQUENCE = 4
    """Shards the sequences of a batch over context ranks."""
    REGION = 5
    """Tensor-parallel regions, the blocks around them, and layers whose weights are sharded."""
    OPERATOR = 6
    """The computation itself, in an operator of ours."""


class Wrap:
    """``wrapper`` around the function ``inner``, which may be a Wrap itself: a chain."""

    def __init__(self, wrapper: Wrapper, inner: Forward, level: IntEnum) -> None:
        functools.update_wrapper(self, inner)
        self.wrapper, self.inner, self.level = wrapper, inner, level

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapper(self.inner, *args, **kwargs)


class WrappedForward(Wrap):
    """The forward of one module: ``wrapper`` around ``inner``."""

    __call__ = disable_tracing(Wrap.__call__)


def insert_wrap(owner: object, name: str, wrapper: Wrapper, level: IntEnum, kind: type[Wrap] = Wrap) -> None:
    """Wrap the method ``name`` of this one ``owner`` with ``wrapper``, in a Wrap of ``kind``.

    The Wrap is inside of those of outer (smaller) levels, and outside of all others.
    """
    outer, inner = _inside(owner, name, lambda wrap: wrap.level < level)
    if outer is None:
        setattr(owner, name, kind(wrapper, inner, level))
    else:
        outer.inner = kind(wrapper, inner, level)


def remove_wrap(owner: object, name: str, wrapper: Wrapper) -> None:
    """Remove the Wrap of ``wrapper`` from the method ``name`` of ``owner``; ValueError where there is none."""
    outer, made = _inside(owner, name, lambda wrap: wrap.wrapper is not wrapper)
    if not isinstance(made, Wrap):
        raise ValueError(f"{wrapper} wraps no {name} of this {type(owner).__name__}")
    if outer is not None:
        outer.inner = made.inner
    elif made.inner == getattr(type(owner), name).__get__(owner):
        # The method of the class; a client may have bound one of its own to the owner (TRL's forward).
        delattr(owner, name)
    else:
        setattr(owner, name, made.inner)


def _inside(owner: object, name: str, is_outside: Callable[[Wrap], bool]) -> tuple[Wrap | None, Forward]:
    """The last of the outermost Wraps that ``is_outside`` accepts (or None), and the function inside of it."""
    outer: Wrap | None = None
    inner: Forward = getattr(owner, name)
    while isinstance(inner, Wrap) and is_outside(inner):
        outer, inner = inner, inner.inner
    return outer, inner


def wrap_forward(module: nn.Module, wrapper: Wrapper, level: Level) -> None:
    """Put ``wrapper(forward, *args, **kwargs)`` around the forward of this one module.

    It is inside of the wraps of outer levels, and outside of all others.
    """
    insert_wrap(module, "forward", wrapper, level, WrappedForward)


def unwrap_forward(module: nn.Module, wrapper: Wrapper) -> None:
    """Remove the wrap of ``wrapper`` from the forward of ``module``."""
    remove_wrap(module, "forward", wrapper)


def wraps_of(module: nn.Module) -> Iterator[WrappedForward]:
    """The wraps of the forward of ``module``, outermost first."""
    forward: Forward = module.forward
    while isinstance(forward, WrappedForward):
        yield forward
        forward = forward.inner


def innermost_forward(module: nn.Module) -> Forward:
    """The forward of ``module`` without its wraps."""
    found: Forward = module.forward
    for wrap in wraps_of(module):
        found = wrap.inner
    return found


def replace_innermost_forward(module: nn.Module, forward: Forward) -> None:
    """Make ``forward`` the forward of this one module, inside of all its wraps."""
    outer = module.forward
    if not isinstance(outer, WrappedForward):
        module.forward = WrappedForward(_call, forward, Level.OPERATOR)
        return
    while isinstance(outer.inner, WrappedForward):
        outer = outer.inner
    outer.inner = forward


def _call(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def has_own_forward(module: nn.Module) -> bool:
    """Whether the forward of ``module`` is its own and not that of its class."""
    return "forward" in held(module)


def has_class_forward(module: nn.Module) -> bool:
    """Whether the forward of ``module``, inside of all wraps, is that of its class."""
    return bool(innermost_forward(module) == type(module).forward.__get__(module))


def first_parameter_name(module: nn.Module) -> str:
    """The name of the first parameter of ``module``'s forward: its hidden states."""
    return next(iter(inspect.signature(module.forward).parameters))


def replace_first_argument(
    name: str, change: Callable[[Any], Any], args: Arguments, kwargs: dict[str, Any]
) -> tuple[Arguments, dict[str, Any]]:
    """(args, kwargs) with ``change`` applied to the first argument, given by position or by ``name``."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, name: change(kwargs[name])}
