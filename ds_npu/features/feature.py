"""A feature: a key of the section, what it needs of this machine, and what it changes of a model and an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ds_npu.features.build import Build
from ds_npu.features.declaration import Change, Phase

V = TypeVar("V")


def _needs_nothing(value: object) -> list[str]:
    return []


def _changes_nothing(value: object, build: Build) -> Iterable[Change]:
    return ()


def _asks_for_nothing(value: object, build: Build) -> str:
    return ""


def _has_nothing_to_say(build: Build) -> str:
    return ""


@dataclass(frozen=True)
class Feature(Generic[V]):
    """One key of the ``"ds_npu"`` section, whose value is a V (a Section, or a plain value)."""

    key: str
    phase: Phase = Phase.ENGINE
    declare: Callable[[V, Build], Iterable[Change]] = _changes_nothing
    """What it changes of the model, which it only reads; nothing where it is off. Raises where it cannot."""
    parts: Callable[[V, Build], Iterable[Change]] = _changes_nothing
    """What it provides for each engine, whether or not the model has been changed before."""
    asked: Callable[[V, Build], str] = _asks_for_nothing
    """What it asks for, in words, where the changes it declares can be made to a model once only; else empty."""
    without_plan: Callable[[Build], str] = _has_nothing_to_say
    """Whether it works for a model that has no plan, in words."""
    unmet: Callable[[V], list[str]] = _needs_nothing
    """Why this machine cannot do what the value needs; empty where it can."""
