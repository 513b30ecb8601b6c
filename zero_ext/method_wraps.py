"""Wraps of methods of DeepSpeed's engines, optimizers and monitors, on single instances, by the table of cards.

Each wrap has a level, and wraps of an outer level are called first: subscribers may come in any order.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any

from ds_npu.capability import SUPPORTED
from ds_npu.parallel.runtime.forward_wraps import Wrapper, insert_wrap, remove_wrap
from ds_npu.zero_ext.method_cards import CARDS, FRAGMENT, MethodCard

Function = Callable[..., Any]


class MethodLevel(IntEnum):
    """Who wraps a method, outermost first."""

    PROFILE = 0
    """``profile``, which records all that others do in a step, and whose own time is in none of theirs."""
    RECORDED_STEP = 1
    """``memory_report``, which records all that others do in a step."""
    SNAPSHOT = 2
    """``checkpoint.asynchronous``: nothing writes to weights or states before their snapshot is taken."""
    FINITE = 3
    MEMORY_REPORT = 4
    PEAKS = 5
    """``recompute.budget_gib``, which measures its own plan too."""
    MEMORY_PLAN = 6
    PLANNED_CHANGES = 7
    """Inside of what plans: the driver changes the model by the plan that was just made."""
    RELOCATION = 8
    """Experts move behind the step that their load is counted for."""
    EXPERT_LOAD = 9
    THROUGHPUT = 10
    DUMP = 11
    """``dump``, whose steps are those that others have counted."""
    SHARD_ACCESS = 12
    """Optimizers of the client's own may compute with shards."""
    EXPERT_SETTINGS = 13
    """A group of experts has the learning rate of the group that it came from."""
    STATE = 14
    SCATTERED = 15
    """Gradients of ZeRO 3 that ds_npu sends are sent before a backward ends for DeepSpeed."""
    CORRECTION = 16
    """The gradient rule: norms, averages, streams."""
    BUCKETS = 17
    """Partitions of ZeRO 1 and 2 in the order of buckets, inside of all that knows DeepSpeed's order."""


def wrap_method(holder: object, name: str, wrapper: Wrapper, level: MethodLevel) -> Callable[[], None]:
    """Call ``wrapper(method, *args, **kwargs)`` in place of the method ``name`` of this one ``holder``.

    Returns a function that undoes it. Raises RuntimeError where DeepSpeed's method is not as its card says.
    """
    check_card(type(holder), name)
    insert_wrap(holder, name, wrapper, level)
    return partial(remove_wrap, holder, name, wrapper)


def replace_method(holder: object, name: str, function: Function, level: MethodLevel) -> None:
    """Call ``function`` in place of the method ``name`` of this one ``holder``.

    The original is not called.
    """
    wrap_method(holder, name, lambda method, *args, **kwargs: function(*args, **kwargs), level)


def bind_to_weight(weight: object, name: str, function: Function) -> None:
    """Bind ``function`` to ``weight`` in place of DeepSpeed's function ``name``.

    DeepSpeed may bind its own again.
    """
    for card in CARDS:
        if card.name == name and FRAGMENT in card.classes:
            _check(card, FRAGMENT, getattr(importlib.import_module(FRAGMENT), name, None))
            setattr(weight, name, function)
            return
    raise RuntimeError(f"{name} of a weight has no card in ds_npu.zero_ext.method_cards")


def check_card(kind: type, name: str) -> None:
    """Raise RuntimeError where the method ``name`` of the class ``kind`` has no card, or is not as its card says.

    A method that only a class of ds_npu has needs none.
    """
    classes = {f"{each.__module__}:{each.__qualname__}": each for each in kind.__mro__}
    cards = [(card, owner) for card in CARDS if card.name == name for owner in card.classes if owner in classes]
    for card, owner in cards:
        _check(card, owner, inspect.getattr_static(classes[owner], name, None))
    if not cards and not inspect.getattr_static(kind, name).__module__.startswith("ds_npu."):
        raise RuntimeError(f"{kind.__name__}.{name} has no card in ds_npu.zero_ext.method_cards")


def _check(card: MethodCard, owner: str, method: Function | None) -> None:
    found = None if method is None else tuple(inspect.signature(without_nvtx(method)).parameters)[1:]
    if found is None or found[: len(card.parameters)] != card.parameters:
        where = f"{owner.partition(':')[2] or owner}"
        is_there = "is not there" if found is None else f"has the parameters {found}"
        raise RuntimeError(
            f"{where}.{card.name}, which ds_npu wraps, {is_there}; parameters that begin with {card.parameters} are "
            f"expected: this DeepSpeed is not one of the supported versions ({SUPPORTED['deepspeed']})"
        )


def without_nvtx(method: Function) -> Function:
    """The method inside of DeepSpeed's ``instrument_w_nvtx``, which hides its parameters."""
    inner: Function | None = (
        inspect.getclosurevars(method).nonlocals.get("func") if inspect.isfunction(method) else None
    )
    return method if inner is None or method.__name__ != "wrapped_fn" else without_nvtx(inner)
