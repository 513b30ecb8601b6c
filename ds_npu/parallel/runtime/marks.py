"""Marks of single modules of a user's model: typed values of ds_npu, all in one record that the module holds.

``ds_npu check --model FILE --changes`` prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")
held: Callable[[Any], dict[str, Any]] = vars
"""The attributes that an object holds itself, and not its class. Subclasses of tensors overload getattr, setattr."""
RECORD = "ds_npu"
"""The attribute of a module that is its record."""


class Mark(Generic[T]):
    """A value of one type that modules may have in their records, under ``name``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get(self, module: object) -> T | None:
        """The value of ``module``; None where it has none."""
        found: T | None = marks_of(module).get(self.name)
        return found

    def set(self, module: object, value: T) -> None:
        # A new record: a shallow copy of the module has the old one.
        held(module)[RECORD] = {**marks_of(module), self.name: value}


def marks_of(module: object) -> Mapping[str, Any]:
    """The record of ``module``: each value by the name of its mark."""
    found: Mapping[str, Any] = held(module).get(RECORD, {})
    return found
