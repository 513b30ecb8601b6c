"""Attributes that a foreign object (a module, tensor or config) holds itself: read with their type, set past its class.

``nn.Module.__setattr__`` would register a module that is set as a child, and ``__getattr__`` finds what a class holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

from ds_npu.parallel.runtime.marks import held

T = TypeVar("T")


def attribute(owner: object, name: str, kind: type[T]) -> T | None:
    """The attribute ``name`` that ``owner`` holds itself, if it is a ``kind``; else None."""
    found = held(owner).get(name)
    return found if isinstance(found, kind) else None


def attributes(owner: object, kind: type[T]) -> dict[str, T]:
    """Every attribute that ``owner`` holds itself and that is a ``kind``, by name."""
    return {name: value for name, value in held(owner).items() if isinstance(value, kind)}


def has_attribute(owner: object, name: str) -> bool:
    """Whether ``owner`` itself, and not only its class, has the attribute ``name``."""
    return name in held(owner)


def set_attribute(owner: object, name: str, value: object) -> None:
    """Set the attribute ``name`` of this one ``owner``; a module that is set does not become its child."""
    held(owner)[name] = value


@contextmanager
def with_attributes(owner: object, values: Mapping[str, object]) -> Iterator[None]:
    """A context in which ``owner`` has ``values``, which are found before a module's parameters of the same names."""
    held(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            del held(owner)[name]


@contextmanager
def with_plain_weights(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """A context in which ``module`` has its parameters ``names`` as plain tensors."""
    weights = [(name, module.get_parameter(name)) for name in names]
    with with_attributes(module, {name: weight.view_as(weight) for name, weight in weights}):
        yield


def copy_attributes(source: object, target: object) -> None:
    """Give ``target`` every attribute that ``source`` holds itself."""
    held(target).update(held(source))


def remove_attributes(owner: object, chosen: Callable[[str], bool]) -> None:
    """Remove the attributes that ``owner`` holds itself and whose name is ``chosen``."""
    for name in [name for name in held(owner) if chosen(name)]:
        del held(owner)[name]
