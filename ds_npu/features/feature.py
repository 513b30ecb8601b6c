"""A feature: a key of the section, what it needs of this machine, and how it changes a build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ds_npu.features.build import Build

V = TypeVar("V")


def _needs_nothing(value: object) -> list[str]:
    return []


@dataclass(frozen=True)
class Feature(Generic[V]):
    """One key of the ``"ds_npu"`` section, whose value is a V (a Section, or a plain value)."""

    key: str
    apply: Callable[[V, Build], None]
    """Changes the build as the value says; not at all where it is off."""
    unmet: Callable[[V], list[str]] = _needs_nothing
    """Why this machine cannot do what the value needs; empty where it can."""
