"""Changes that a feature declares before anything is changed, each with the function that makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Literal

from torch import nn

from ds_npu.features.loss.model_loss import LossLevel
from ds_npu.log import aligned
from ds_npu.models import names
from ds_npu.parallel.runtime.forward_wraps import Level, P, Wrapper, wrap_forward

Act = Literal["shards", "replaces", "wraps", "computes", "links", "sets", "hooks", "provides", "checks"]
"""Shards a parameter; replaces a module by another of the same name; wraps the forward of a module at a Level; computes
the innermost forward of a module by an operator; links a function into the loss of a model at a LossLevel; sets
attributes of a module; hooks a module's or a parameter's calls; provides a part of the engine; checks the model by
running parts of it."""
ONCE: tuple[Act, ...] = ("shards", "replaces", "computes", "links", "provides")
"""Acts that at most one feature does to one part."""
OF_THE_ENGINE: tuple[Act, ...] = ("provides", "checks")
"""Acts that concern no part of a model."""


class Phase(IntEnum):
    """When a feature is applied: earlier phases come first."""

    ENGINE = 0
    """Parts of the engine; the model does not change."""
    STAGES = 1
    """Reduces the model to the layers of this rank: later phases change only these."""
    SHARDS = 2
    SEQUENCES = 3
    OPERATORS = 4
    WRAPS = 5
    """Wraps around everything that earlier phases made of a module."""
    PLANNED = 6
    """Changes that a plan has chosen in training, made before a step of the optimizer."""


@dataclass(frozen=True)
class Change:
    """One change of one part of a model or of an engine."""

    act: Act
    part: str
    """The name of a module or parameter in the model ("": the model itself), or of a part of the engine."""
    what: str
    """The result for the part; for "sets", the names of the attributes, separated by ", "."""
    make: Callable[[], object] | None = None
    """Makes the change; None where the preceding Change's ``make`` makes this one, too."""
    level: Level | LossLevel | None = None
    """The level of a change that "wraps" or "links"."""


def wrap_by_name(model: nn.Module, name: str, what: str, wrapper: Wrapper, level: Level) -> Change:
    """Wrap the module ``name`` of ``model`` by ``wrapper(module, forward, *args, **kwargs)``.

    The module is looked up when the change is made: changes before it may replace the module.
    """

    def make() -> None:
        module = model.get_submodule(name)
        wrap_forward(module, partial(wrapper, module), level)

    return Change("wraps", name, what, make, level)


@dataclass(frozen=True)
class Declaration:
    """All changes of one feature."""

    key: str
    phase: Phase
    changes: Sequence[Change]

    def apply(self) -> None:
        make_changes(self.changes)


def make_changes(changes: Iterable[Change]) -> None:
    """Make ``changes``, in their order."""
    for change in changes:
        if change.make is not None:
            change.make()


def making(declare: Callable[P, Iterable[Change]]) -> Callable[P, None]:
    """The function that makes the changes of ``declare`` at once; it has the same arguments and errors."""

    def make(*args: P.args, **kwargs: P.kwargs) -> None:
        make_changes(declare(*args, **kwargs))

    return make


class ConflictError(ValueError):
    """Every contradiction between what features declare."""

    def __init__(self, model: str, conflicts: Sequence[str]) -> None:
        count = "1 conflict" if len(conflicts) == 1 else f"{len(conflicts)} conflicts"
        super().__init__(
            "\n  ".join([f"{count} between features that change {model}; turn one of each off:", *conflicts])
        )


def check_declarations(model: nn.Module, declarations: Sequence[Declaration], made: Sequence[Declaration] = ()) -> None:
    """Raise ConflictError where two features do the same once-only thing, or a replacement loses an earlier change.

    ``made``: declarations that were applied before. Raises ValueError for a change of something that ``model`` does
    not have, which is a mistake in a feature.
    """
    parts = {name for name, _ in model.named_modules()} | {
        name for name, _ in model.named_parameters(remove_duplicate=False)
    }
    owners: dict[tuple[Act, str, IntEnum | None], Declaration] = {
        (change.act, change.part, change.level): declaration for declaration in made for change in declaration.changes
    }
    found: list[str] = []
    for declaration in declarations:
        for change in declaration.changes:
            if change.act not in OF_THE_ENGINE and change.part not in parts:
                raise ValueError(f"ds_npu.{declaration.key} declares a change of {change.part}, which is not there")
            other = owners.setdefault((change.act, change.part, change.level), declaration)
            if change.act in ONCE and other is not declaration:
                both = f"ds_npu.{other.key} and ds_npu.{declaration.key}"
                what = f"{change.act} {change.part or 'the model'}: {change.what}"
                found.append(f"both {both} want what only one can: {what}")
    found += [
        f"ds_npu.{owner.key} {act} {part}, and ds_npu.{declaration.key} replaces {change.part} afterwards"
        for declaration in declarations
        for change in declaration.changes
        if change.act == "replaces"
        for (act, part, _), owner in owners.items()
        if owner.phase < declaration.phase and act not in OF_THE_ENGINE and names.is_inside(part, change.part)
    ]
    if found:
        raise ConflictError(type(model).__name__, list(dict.fromkeys(found)))


def table(declarations: Iterable[Declaration]) -> Iterator[str]:
    """Rows for people, in the order of application; parts that differ only in indices share one."""
    rows: list[tuple[str, str, str, str]] = []
    for declaration in sorted(declarations, key=lambda each: each.phase):
        groups: dict[tuple[str, str, str], list[str]] = {}
        for change in declaration.changes:
            at = f" ({change.level.name})" if change.level is not None else ""
            group = groups.setdefault((change.act, names.generic(change.part), change.what + at), [])
            if change.part not in group:
                group.append(change.part)
        for (act, _, what), parts in groups.items():
            rows.append((declaration.key, act, names.abbreviated(parts) or "the model", what))
    yield from aligned(rows)
