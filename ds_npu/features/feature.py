"""What a feature is: a key of the section, what it needs of this machine, and what it does to a build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ds_npu.features.build import Build

V = TypeVar("V")


def _needs_nothing(value: Any) -> list[str]:
    return []


def _does_nothing(value: Any, build: Build) -> None:
    return None


@dataclass(frozen=True)
class Feature(Generic[V]):
    """One key of the ``"ds_npu"`` section, whose value is a V (a Section, or a plain value)."""

    key: str
    unmet: Callable[[V], list[str]] = _needs_nothing
    """Why this machine cannot do what the value asks for; empty where it can."""
    apply: Callable[[V, Build], None] = _does_nothing
    """Does to the build what the value asks for; nothing where the value is off."""
