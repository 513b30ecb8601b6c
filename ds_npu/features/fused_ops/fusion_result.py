"""What became of one module of a model, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ds_npu.models import names


class FusionResult(NamedTuple):
    """One module that an operator was to be put into."""

    module: str
    """Its name in the model, and what else tells what it is."""
    reason: str = ""
    """Why it was left as it is; empty where the operator is in it now."""


def described(operator: str, outcomes: Sequence[FusionResult]) -> Iterator[str]:
    """A line for each thing that is to be said, modules that differ in indices only together."""
    by_reason: dict[str, list[str]] = {}
    for outcome in outcomes:
        by_reason.setdefault(outcome.reason, []).append(outcome.module)
    for reason, modules in by_reason.items():
        kinds: dict[str, list[str]] = {}
        for module in modules:
            kinds.setdefault(names.generic(module), []).append(module)
        where = ", ".join(names.abbreviated(each) or "the model" for each in kinds.values())
        yield f"{operator} is not in {where}: {reason}" if reason else f"{operator} is in {where}"
    if not outcomes:
        yield f"{operator} is nowhere: the model has no module for it"
