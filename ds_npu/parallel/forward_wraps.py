"""Wraps of the forward of single modules of a user's model; their classes do not change, and hooks stay outermost."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import nn
from torch._compile import _disable_dynamo

P = ParamSpec("P")
R = TypeVar("R")

Forward = Callable[..., Any]
"""The forward of some module: its parameters and its result are the module's own."""
Wrapper = Callable[..., Any]
"""``wrapper(forward, *args, **kwargs)``, called in place of ``forward(*args, **kwargs)``."""


def disable_tracing(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which torch.compile does not trace: it runs as it is where traced code calls it.

    torch 2.13 ends in internal errors when it traces collectives in autograd functions and forwards of single modules.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    # torch.compiler.disable does the same, but imports the compiler at once.
    made: Callable[P, R] = _disable_dynamo(run)
    return made


class WrappedForward:
    """The forward of one module: ``wrapper`` around ``inner``."""

    def __init__(self, wrapper: Wrapper, inner: Forward) -> None:
        functools.update_wrapper(self, inner)
        self.wrapper, self.inner = wrapper, inner

    @disable_tracing
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapper(self.inner, *args, **kwargs)


def wrap_forward(module: nn.Module, wrapper: Wrapper) -> None:
    """Make ``wrapper(forward, *args, **kwargs)`` the forward of this one module, outside of earlier wraps."""
    module.forward = WrappedForward(wrapper, module.forward)


def innermost_forward(module: nn.Module) -> Forward:
    """The forward of ``module`` without its wraps."""
    forward: Forward = module.forward
    while isinstance(forward, WrappedForward):
        forward = forward.inner
    return forward


def replace_innermost_forward(module: nn.Module, forward: Forward) -> None:
    """Make ``forward`` the forward of this one module, inside of all its wraps."""
    outer = module.forward
    if not isinstance(outer, WrappedForward):
        module.forward = WrappedForward(_call, forward)
        return
    while isinstance(outer.inner, WrappedForward):
        outer = outer.inner
    outer.inner = forward


def _call(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def has_own_forward(module: nn.Module) -> bool:
    """Whether the forward of ``module`` is its own and not that of its class."""
    return "forward" in vars(module)


def first_parameter_name(module: nn.Module) -> str:
    """The name of the first parameter of ``module``'s forward: its hidden states."""
    return next(iter(inspect.signature(module.forward).parameters))


def replace_first_argument(
    name: str, change: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) whose first argument, given by position or by ``name``, is what ``change`` makes of it."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, name: change(kwargs[name])}
