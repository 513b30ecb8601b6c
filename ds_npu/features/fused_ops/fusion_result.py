"""The result of putting an operator into a module, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from torch import nn

from ds_npu.features.declaration import Change
from ds_npu.models import names
from ds_npu.parallel.runtime.forward_wraps import Forward, replace_innermost_forward


class FusionResult(NamedTuple):
    """Whether an operator can be put into one module."""

    module: str
    """Its name in the model."""
    reason: str = ""
    """Why it is left as it is; empty where the operator goes into it."""
    condition: str = ""
    """When the module computes with the operator; empty: always."""
    changes: tuple[Change, ...] = ()


def computed_by(operator: str, module: nn.Module, name: str, forward: Forward) -> FusionResult:
    """The result for the module ``name``, whose innermost forward becomes ``forward``, which calls ``operator``."""
    make = partial(replace_innermost_forward, module, forward)
    return FusionResult(name, changes=(Change("computes", name, operator, make),))


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
