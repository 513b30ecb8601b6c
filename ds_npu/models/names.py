"""Module names: without PEFT's and torch.compile's wrappers, with indices abbreviated, and matched by globs."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

BASE_LAYER = "base_layer"
"""The attribute in which PEFT keeps the layer that an adapter is added to."""
PARAMETER = "parameter_name"
"""The attribute in which PEFT's wrapper of a parameter, as of experts, keeps the name of the parameter."""
IS_OUT_IN = "_did_swap_in_out_features"
"""The attribute of such a wrapper that says whether the parameter is [E, out, in]; else it is [E, in, out]."""
ORIGINAL = "original_module"
TRAINED_COPIES = "modules_to_save"
"""The attribute in which PEFT keeps a layer that it trains as a whole: the original, and the trained copies."""
COMPILED = "_orig_mod"
"""The attribute in which torch.compile keeps the module that it has compiled."""
WRAPPERS = re.compile(
    rf"\.(?:{BASE_LAYER}|{ORIGINAL}|{TRAINED_COPIES}\.[^.]+|{COMPILED})(?=\.|$)|^(?:{COMPILED}(?:\.|$))+"
)

NUMBERS = re.compile(r"\{\d+(\.\.\d+)?(,\d+(\.\.\d+)?)*\}")
"""Several indices as ``abbreviated`` writes them, and as a glob may have them."""
DOTS = re.compile(r"\.(?![^{]*\})")
"""Dots between the parts of a glob."""
NEAR = 3
"""Number of names that are suggested for one that does not exist."""


def plain(name: str) -> str:
    """The name that a module has in the model without wrappers: ``base_model.model.a.base_layer`` is ``a``."""
    return f"{WRAPPERS.sub('', name)}.".removeprefix("base_model.model.")[:-1]


def parent(name: str) -> str:
    """The name of the module that holds the module ``name``; "" for the model."""
    return name.rpartition(".")[0]


def owner(name: str) -> str:
    """The name of the module that holds the module ``name`` in the model without PEFT."""
    return next(each for each in ancestors(name) if plain(each) == parent(plain(name)))


def is_copy(name: str) -> bool:
    """Whether ``name`` is an original that PEFT replaced by a trained copy, or such a copy."""
    return name.endswith(f".{ORIGINAL}") or parent(name).endswith(f".{TRAINED_COPIES}")


def is_adapted(name: str) -> bool:
    """Whether the module ``name`` is in a LoRA adapter of PEFT, or in the layer that an adapter is added to."""
    parts = name.split(".")
    return BASE_LAYER in parts or any(part.startswith("lora_") for part in parts)


def ancestors(name: str) -> Iterable[str]:
    """The names of the modules around ``name``, innermost first, the model ("") last."""
    while name:
        name = parent(name)
        yield name


def is_inside(name: str, other: str) -> bool:
    """Whether the module ``name`` is the module ``other`` or inside it; all modules are in the model ("")."""
    return not other or f"{name}.".startswith(f"{other}.")


def generic(name: str) -> str:
    """``name`` with * for each index."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def abbreviated(names: Collection[str]) -> str:
    """One text for names that differ only in indices: ``layers.{0..31}.mlp``."""
    columns = [list(dict.fromkeys(column)) for column in zip(*(name.split(".") for name in names), strict=True)]
    if math.prod(map(len, columns)) == len(names):
        return ".".join(map(_joined, columns))
    # Not every combination of the indices: one abbreviation for each value of the first that differs.
    varying = next(index for index, column in enumerate(columns) if len(column) > 1)
    groups = [[name for name in names if name.split(".")[varying] == part] for part in columns[varying]]
    return ", ".join(map(abbreviated, groups))


def _joined(parts: list[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    runs: list[list[int]] = []
    for number in sorted(map(int, parts)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "{" + ",".join([f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]) + "}"


def matches(glob: str, name: str) -> bool:
    """Whether ``glob`` matches the module ``name``, by its full name or by the one without PEFT.

    ``*``, ``?`` and ``[...]`` stand for characters of one part of a name, ``**`` for any number of parts (also none),
    ``{0,2..5}`` for one of these numbers: ``layers.*`` are the blocks, ``layers.**`` the list and all that is in it.
    """
    return any(_match(DOTS.split(glob), each.split(".") if each else []) for each in {name, plain(name)})


def _match(globs: list[str], parts: list[str]) -> bool:
    if not globs:
        return not parts
    if globs[0] == "**":
        return any(_match(globs[1:], parts[start:]) for start in range(len(parts) + 1))
    return bool(parts) and _match_part(globs[0], parts[0]) and _match(globs[1:], parts[1:])


def _match_part(glob: str, part: str) -> bool:
    if not NUMBERS.fullmatch(glob):
        return fnmatchcase(part, glob)
    runs = (run.split("..") for run in glob[1:-1].split(","))
    return part.isdecimal() and any(int(run[0]) <= int(part) <= int(run[-1]) for run in runs)


def suggestion(glob: str, existing: Iterable[str]) -> str:
    """Suggest what to write for a ``glob`` that matches none of ``existing``; empty where nothing is near.

    The glob with ``**`` where parts are missing, and names that it matches; else the names that are written most alike.
    """
    known = [name for name in existing if name]
    parts = DOTS.split(glob)
    for wider in (f"**.{glob}", ".**.".join(parts), ".**.".join(["**", *parts]).replace("**.**", "**")):
        found = list(dict.fromkeys(generic(plain(name)) for name in known if matches(wider, name)))
        if found:
            more = " ..." if len(found) > NEAR else ""
            return (
                "; * stands for characters of one part of a name, and ends at a dot, ** for any number of parts: "
                f'"{wider}" matches {", ".join(found[:NEAR])}{more}'
            )
    every = list(dict.fromkeys(generic(plain(name)) for name in known))
    before, _, end = glob.rpartition("**.")
    if not before and end != glob:
        # Ends of names, of as many parts as follow the stars.
        count = len(DOTS.split(end))
        every = list(dict.fromkeys(f"**.{'.'.join(name.split('.')[-count:])}" for name in every))
    found = difflib.get_close_matches(generic(glob), every, n=NEAR, cutoff=0.8)
    return ", did you mean " + " or ".join(f'"{name}"' for name in found) + "?" if found else ""
