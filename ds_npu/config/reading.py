"""Reading of the raw ``"ds_npu"`` section into its typed form, with every wrong key, type and value at once."""

from __future__ import annotations

import difflib
import functools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ds_npu.config.problems import MOST_PROBLEMS, Problem
from ds_npu.config.schema import accepted, leaves, section_schema
from ds_npu.config.sections import DsNpuConfig

Keys = tuple[str, ...]

UNKNOWN = "no such key"
MOST_LETTERS = 64
"""Letters of the longest word that is compared with known ones."""
KEY = "[key]"
"""pydantic's mark of an error in a key, not in its value."""


@dataclass(frozen=True)
class Reading:
    """A section without its wrong keys, and its mistakes."""

    config: DsNpuConfig
    problems: list[Problem]
    doubtful: frozenset[str]
    """Paths, within the section, of keys whose intended value is not known: wrong keys, and keys that were misspelt."""


def read(raw: Any) -> Reading:
    """Read the section, which may be any value."""
    if not isinstance(raw, dict):
        return _no_section(raw)
    rest = _with_string_keys(raw)
    found: dict[Keys, Any] = {}
    while True:
        try:
            config = DsNpuConfig.model_validate(rest)
        except ValidationError as error:
            paths = {_cut(item["loc"]) for item in error.errors(include_url=False, include_context=False)}
            if () in paths:
                return _no_section(raw)
            for path in sorted(paths):
                if not any(path[:length] in found for length in range(len(path))):
                    found[path] = functools.reduce(operator.getitem, path[:-1], rest).pop(path[-1])
        else:
            problems = {_full(path): _problem(path, value, at) for at, (path, value) in enumerate(found.items())}
            unknown = {path for path, problem in problems.items() if problem.accepted.startswith(UNKNOWN)}
            problems |= {path: problem for path, problem in _autos(raw) if path not in unknown}
            return Reading(config, list(problems.values()), _below(_intended(found)))


def _no_section(raw: Any) -> Reading:
    return Reading(DsNpuConfig(), [Problem("ds_npu", raw, accepted(section_schema()))], _below({()}))


def _with_string_keys(raw: Any) -> Any:
    """A copy, from which keys can be removed; a dict made in Python may have keys that are no strings."""
    if not isinstance(raw, dict):
        return raw
    # pydantic reads no lone surrogates.
    names = {key: str(key).encode("utf-8", "backslashreplace").decode("utf-8") for key in raw}
    return {names[key]: _with_string_keys(value) for key, value in raw.items()}


def _full(path: Keys) -> str:
    return ".".join(("ds_npu", *path))


def _node(path: Keys) -> dict[str, Any] | None:
    """The schema of the key at ``path``, also of one that users name (a glob in ``plan``); None for an unknown key."""
    node: dict[str, Any] | None = section_schema()
    for part in path:
        node = node and (node.get("properties", {}).get(part) or _of_any_key(node))
    return node


def _of_any_key(node: dict[str, Any]) -> dict[str, Any] | None:
    """The schema of the values of a key under which users name the keys.

    None for a plain value or a section.
    """
    schema = node.get("additionalProperties")
    return schema if isinstance(schema, dict) else None


def _below(paths: set[Keys]) -> frozenset[str]:
    if not paths:
        # The schema costs more than the rest of a check in which nothing is wrong.
        return frozenset()
    return frozenset(".".join(leaf) for leaf in _every() if any(leaf[:end] in paths for end in range(len(leaf) + 1)))


def _cut(location: tuple[int | str, ...]) -> Keys:
    """The key of an error at pydantic's ``location``, without indices of lists and branches of unions below it."""
    path: Keys = ()
    # A wrong key of the user's own is a wrong value of the key above it; that key itself may be called "[key]".
    for part in location[:-2] if location[2:] and location[-1] == KEY else location:
        node = _node(path)
        if node is None or not ("properties" in node or _of_any_key(node)):
            break
        path += (str(part),)
    return path


def _problem(path: Keys, found: Any, index: int) -> Problem:
    """The ``index``-th problem; it has no suggestion where no error would list it."""
    node = _node(path)
    if node is not None:
        return Problem(_full(path), found, accepted(node))
    return Problem(_full(path), found, _unknown(path) if index < MOST_PROBLEMS else UNKNOWN)


def _intended(found: Iterable[Keys]) -> set[Keys]:
    """The keys whose intended value is not known: wrong keys, and keys for which unknown ones were meant."""
    known = {path for path in found if _node(path)}
    unknown = [path for path in found if path not in known]
    if len(unknown) > MOST_PROBLEMS:
        # Doubt the whole section.
        return {()}
    return known | {meant for path in unknown if (meant := _meant(path))}


@functools.cache
def _every() -> tuple[Keys, ...]:
    return tuple(tuple(leaf.split(".")) for leaf, _ in leaves(section_schema()))


def _meant(path: Keys) -> Keys | None:
    """The key for which an unknown one was meant: one of its name elsewhere, else a neighbour with nearly its name."""
    elsewhere = [leaf for leaf in _every() if leaf[-1] == path[-1]]
    near = near_miss(path[-1], _neighbours(path))
    return next(iter([*elsewhere, *((*path[:-1], key) for key in near)]), None)


def near_miss(word: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """The word in ``known`` that ``word`` may be a misspelling of, if any; none for over 64 characters."""
    return difflib.get_close_matches(word, known, n=1, cutoff=cutoff) if len(word) <= MOST_LETTERS else []


def _neighbours(path: Keys) -> list[str]:
    return list((_node(path[:-1]) or {})["properties"])


def _unknown(path: Keys) -> str:
    meant = _meant(path)
    hint = f", did you mean {_full(meant)}?" if meant else ""
    return f"{UNKNOWN}{hint} (keys of {_full(path[:-1])}: {', '.join(_neighbours(path))})"


def _autos(raw: Any, path: str = "ds_npu") -> Iterator[tuple[str, Problem]]:
    """Problems of ``"auto"`` anywhere in the section: accelerate refuses it for keys that it does not know."""
    if raw == "auto" or (isinstance(raw, list) and "auto" in raw):
        yield path, Problem(path, raw, "leave the key out for ds_npu to choose")
    elif isinstance(raw, dict):
        for key, value in raw.items():
            yield from _autos(value, f"{path}.{key}")
