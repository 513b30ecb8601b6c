"""Compares a written checkpoint with a run's model: names, shapes and dtypes of plain weights, no values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_npu.checkpoint.manifest import is_readable_as

LISTED = 6
"""How many names of a kind an error lists; the others are counted."""


class Plain(NamedTuple):
    """Shape and dtype of a weight or buffer in the plain model."""

    shape: tuple[int, ...]
    dtype: str | None


@dataclass(frozen=True)
class Differences:
    """The names at which a checkpoint and a model do not fit."""

    missing: Sequence[str] = ()
    """Names in the model only."""
    unexpected: Sequence[str] = ()
    """Names in the checkpoint only."""
    other: Sequence[str] = ()
    """Sentences about weights of another shape, or whose dtype cannot be converted."""

    @property
    def any_names(self) -> bool:
        return bool(self.missing or self.unexpected)

    def told(self) -> str:
        kinds = (
            ("missing from the checkpoint", self.missing),
            ("in the checkpoint only", self.unexpected),
            ("of another shape or dtype", self.other),
        )
        return "; ".join(f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds if names)


def differences(written: Mapping[str, Plain], wanted: Mapping[str, Plain]) -> Differences:
    """Compare the weights of a checkpoint with those that one rank holds."""
    missing = [name for name in wanted if name not in written]
    unexpected = [name for name in written if name not in wanted]
    other = []
    for name, mine in wanted.items():
        theirs = written.get(name)
        if theirs is None:
            continue
        if theirs.shape != mine.shape:
            other.append(f"{name} is {list(theirs.shape)} in the checkpoint and {list(mine.shape)} in the model")
        elif not is_readable_as(theirs.dtype, mine.dtype):
            other.append(f"{name} is {theirs.dtype} in the checkpoint and {mine.dtype} in the model")
    return Differences(missing, unexpected, other)


def over_ranks(found: Sequence[Differences]) -> Differences:
    """The differences of a model whose weights are on several ranks: a name that no rank has is unexpected."""
    held = [set(each.unexpected) for each in found]
    return Differences(
        list(dict.fromkeys(name for each in found for name in each.missing)),
        [name for name in found[0].unexpected if all(name in each for each in held)] if found else (),
        list(dict.fromkeys(line for each in found for line in each.other)),
    )


def _some(names: Sequence[str]) -> str:
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
