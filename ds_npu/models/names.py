"""Module names: without what PEFT puts between, with indices abbreviated, and matched by globs."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Iterable

BASE_LAYER = "base_layer"
"""Where PEFT keeps the layer that an adapter is added to."""
ORIGINAL = "original_module"
COPIES = "modules_to_save"
"""Where it keeps the layer that is trained as a whole, and the copies of it that are."""
PEFT_PREFIX = "base_model.model."
BETWEEN = re.compile(rf"\.(?:{BASE_LAYER}|{ORIGINAL}|{COPIES}\.[^.]+)(?=\.|$)")


def plain(name: str) -> str:
    """The name that a module has in the model without PEFT: ``base_model.model.a.base_layer`` is ``a``."""
    return f"{BETWEEN.sub('', name)}.".removeprefix(PEFT_PREFIX)[:-1]


def parent(name: str) -> str:
    """The name of the module that holds the one of ``name``; "" for the model."""
    return name.rpartition(".")[0]


def ancestors(name: str) -> Iterable[str]:
    """The names of the modules around ``name``, from the inside out, the model ("") included."""
    while name:
        name = parent(name)
        yield name


def is_inside(name: str, other: str) -> bool:
    """Whether the module ``name`` is the one of ``other`` or in it; all modules are in the model ("")."""
    return not other or f"{name}.".startswith(f"{other}.")


def generic(name: str) -> str:
    """``name`` with a * for each index."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def abbreviated(names: Collection[str]) -> str:
    """Names that are the same up to their indices as one: ``layers.{0..31}.mlp``."""
    columns = [list(dict.fromkeys(column)) for column in zip(*(name.split(".") for name in names), strict=True)]
    if math.prod(map(len, columns)) == len(names):
        return ".".join(map(_joined, columns))
    # Not every combination of the indices: one abbreviation for each of the first of them that differ.
    varying = next(place for place, column in enumerate(columns) if len(column) > 1)
    groups = [[name for name in names if name.split(".")[varying] == part] for part in columns[varying]]
    return ", ".join(map(abbreviated, groups))


def _joined(parts: list[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    numbers = sorted(int(part) for part in parts)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return "{" + ",".join(texts) + "}"


@functools.cache
def pattern(glob: str) -> re.Pattern[str]:
    """What ``glob`` matches: ``*`` and ``?`` within one part of a name, ``**`` any number of parts (also none).

    ``[abc]`` and ``[!abc]`` are sets of characters. ``layers.*`` are the blocks, ``layers.**`` all in them, too.
    """
    text = ""
    for part in glob.split("."):
        text += r"(?:\.[^.]+)*" if part == "**" else r"\." + _part(part)
    return re.compile(text + r"\Z")


def _part(part: str) -> str:
    pieces = re.split(r"(\[!?[^\]]+\]|\*+|\?)", part)
    return "".join(_piece(piece) for piece in pieces)


def _piece(piece: str) -> str:
    if piece.startswith("["):
        return piece.replace("\\", r"\\").replace("[!", "[^", 1)
    return {"?": r"[^.]"}.get(piece) or (r"[^.]*" if piece.startswith("*") else re.escape(piece))


def matches(glob: str, name: str) -> bool:
    """Whether ``glob`` matches the module ``name``, by its full name or by the one without PEFT."""
    return any(pattern(glob).match(f".{each}" if each else "") is not None for each in {name, plain(name)})
