"""Wraps of one module's forward: their levels decide who calls whom, the order in which they are put on does not."""

from __future__ import annotations

from types import MethodType

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ds_npu.parallel.runtime.forward_wraps import Level, replace_innermost_forward, unwrap_forward, wrap_forward


def wrap(module: nn.Module, level: Level, called: list[str]) -> None:
    def wrapper(forward, *args, **kwargs):
        called.append(level.name)
        return forward(*args, **kwargs)

    wrap_forward(module, wrapper, level)


@given(st.permutations(list(Level)), st.integers(0, len(Level)))
def test_the_order_of_wrapping_means_nothing(levels, replaced_after):
    module, called = nn.Linear(2, 2), []

    def operator(x):
        called.append("the forward itself")
        return -x

    for index, level in enumerate(levels):
        if index == replaced_after:
            replace_innermost_forward(module, operator)
        wrap(module, level, called)
    if replaced_after == len(levels):
        replace_innermost_forward(module, operator)
    assert torch.equal(module(torch.ones(2)), -torch.ones(2))
    assert called == ["MODEL", "OVERLAP", "SWAP", "RECOMPUTE", "SEQUENCE", "REGION", "OPERATOR", "the forward itself"]


def test_of_one_level_the_later_wrap_is_outside():
    module, called = nn.Identity(), []
    for name in ("first", "second"):

        def wrapper(forward, x, name=name):
            called.append(name)
            return forward(x)

        wrap_forward(module, wrapper, Level.REGION)
    module(1)
    assert called == ["second", "first"]


def test_the_class_and_other_instances_stay_as_they_are():
    module, other, called = nn.Linear(2, 2), nn.Linear(2, 2), []
    wrap(module, Level.REGION, called)
    other(torch.ones(2))
    assert not called and "forward" not in vars(other)


def test_a_wrap_is_removed_from_a_forward_that_a_client_has_bound():
    """TRL puts a method of its own in place of a model's forward."""
    module = nn.Linear(2, 2)
    own = MethodType(lambda self, x: x, module)
    module.forward = own

    def wrapper(forward, *args):
        return forward(*args)

    wrap_forward(module, wrapper, Level.MODEL)
    unwrap_forward(module, wrapper)
    assert module.forward is own
    del module.forward
    wrap_forward(module, wrapper, Level.MODEL)
    unwrap_forward(module, wrapper)
    assert "forward" not in vars(module)
