"""The result of putting an operator into a module, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ds_npu.models import names


class FusionResult(NamedTuple):
    """Whether an operator was put into one module."""

    module: str
    """Its name in the model."""
    reason: str = ""
    """Why it was left as it is; empty where the operator is in it now."""
    condition: str = ""
    """When it computes with the operator that is in it; empty: always."""


def result_lines(operator: str, results: Sequence[FusionResult]) -> Iterator[str]:
    """Lines that say where ``operator`` is and is not; modules that differ only in indices share one."""
    alike: dict[tuple[str, str], list[str]] = {}
    for result in results:
        alike.setdefault((result.reason, result.condition), []).append(result.module)
    for (reason, condition), modules in alike.items():
        kinds: dict[str, list[str]] = {}
        for module in modules:
            kinds.setdefault(names.generic(module), []).append(module)
        where = ", ".join(names.abbreviated(each) or "the model" for each in kinds.values())
        is_in = f"{operator} is in {where}{f', used where {condition}' if condition else ''}"
        yield f"{operator} is not in {where}: {reason}" if reason else is_in
    if not results:
        yield f"{operator} is nowhere: the model has no module for it"
