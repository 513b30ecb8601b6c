"""A feature: a key of the section, its needs of this machine, and its changes of a model and an engine."""

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
    """Declares the changes of the model, which it only reads; none where it is off. Raises where it cannot."""
    parts: Callable[[V, Build], Iterable[Change]] = _changes_nothing
    """Declares the parts that it provides for each engine, also for a model that was changed before."""
    asked: Callable[[V, Build], str] = _asks_for_nothing
    """Describes its value, where its changes can be made to a model only once; else empty."""
    without_plan: Callable[[Build], str] = _has_nothing_to_say
    """Says in words whether it works for a model without a plan."""
    unmet: Callable[[V], list[str]] = _needs_nothing
    """Tells why this machine cannot do what the value needs; empty where it can."""
