"""From the raw ``"ds_npu"`` section to its typed form, with every wrong key, type and value said at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ds_npu.config import Problem
from ds_npu.features.all import DsNpuConfig
from ds_npu.features.schema import accepted, leaves, section_schema

Keys = tuple[str, ...]

UNKNOWN = "no such key"
KEY = "[key]"
"""pydantic's mark of an error in a key, not in its value."""


@dataclass(frozen=True)
class Reading:
    """What could be read of a section."""

    config: DsNpuConfig
    """The section without its wrong keys."""
    problems: list[Problem]
    doubtful: frozenset[str]
    """Paths within the section of keys whose intended value is not known, a misspelt neighbour's included."""


def read(raw: Any) -> Reading:
    """Read the section, whatever it is."""
    if not isinstance(raw, dict):
        return Reading(DsNpuConfig(), [Problem("ds_npu", raw, accepted(section_schema()))], _below({()}))
    rest = _with_string_keys(raw)
    found: dict[Keys, Any] = {}
    while True:
        try:
            config = DsNpuConfig.model_validate(rest)
        except ValidationError as error:
            for path in sorted({_cut(item["loc"]) for item in error.errors(include_url=False)}):
                if not any(path[:length] in found for length in range(len(path))):
                    found[path] = _remove(rest, path)
        else:
            problems = {_full(path): _problem(path, value) for path, value in found.items()}
            problems |= {path: problem for path, problem in _autos(raw) if not _is_unknown(problems.get(path))}
            # A key that does not exist was meant for another one, whose value is then not known.
            doubtful = {meant for path in found if (meant := path if _node(path) else _meant(path))}
            return Reading(config, list(problems.values()), _below(doubtful))


def _with_string_keys(raw: Any) -> Any:
    """A copy to take keys out of; a dict made in Python may have other keys than JSON has."""
    return {str(key): _with_string_keys(value) for key, value in raw.items()} if isinstance(raw, dict) else raw


def _full(path: Keys) -> str:
    return ".".join(("ds_npu", *path))


def _node(path: Keys) -> dict[str, Any] | None:
    """The schema of the key at ``path``, also of a user's own in a key that holds such; None where there is none."""
    node: dict[str, Any] | None = section_schema()
    for part in path:
        node = node and (node.get("properties", {}).get(part) or _of_any_key(node))
    return node


def _of_any_key(node: dict[str, Any]) -> dict[str, Any] | None:
    """The schema of all values of a key that holds any keys; None where a key is a value or a section."""
    schema = node.get("additionalProperties")
    return schema if isinstance(schema, dict) else None


def _below(paths: set[Keys]) -> frozenset[str]:
    """The keys at and below ``paths``."""
    if not paths:
        # The schema costs more than the rest of a check in which nothing is wrong.
        return frozenset()
    every = [leaf for leaf, _ in leaves(section_schema())]
    return frozenset(leaf for leaf in every if any(tuple(leaf.split("."))[: len(path)] == path for path in paths))


def _cut(location: tuple[int | str, ...]) -> Keys:
    """pydantic's place of an error, without what it adds below a key (list index, branch of a union)."""
    path: Keys = ()
    # A wrong key of the user's own is a wrong value of what holds it; that key itself may be called "[key]".
    for part in location[:-2] if location[2:] and location[-1] == KEY else location:
        node = _node(path)
        if node is None or not ("properties" in node or _of_any_key(node)):
            break
        path += (str(part),)
    return path


def _remove(raw: dict[str, Any], path: Keys) -> Any:
    """Take the key at ``path`` out of ``raw`` and return its value."""
    for part in path[:-1]:
        raw = raw[part]
    return raw.pop(path[-1])


def _problem(path: Keys, found: Any) -> Problem:
    node = _node(path)
    return Problem(_full(path), found, accepted(node) if node else _unknown(path))


def _meant(path: Keys) -> Keys | None:
    """The key that an unknown one stands for: one of its name elsewhere, else one beside it with nearly its name."""
    every = [tuple(leaf.split(".")) for leaf, _ in leaves(section_schema())]
    elsewhere = [leaf for leaf in every if leaf[-1] == path[-1]]
    near = difflib.get_close_matches(path[-1], _neighbours(path), n=1)
    return next(iter([*elsewhere, *((*path[:-1], key) for key in near)]), None)


def _neighbours(path: Keys) -> list[str]:
    return list((_node(path[:-1]) or {})["properties"])


def _unknown(path: Keys) -> str:
    meant = _meant(path)
    hint = f", did you mean {_full(meant)}?" if meant else ""
    return f"{UNKNOWN}{hint} (keys of {_full(path[:-1])}: {', '.join(_neighbours(path))})"


def _is_unknown(problem: Problem | None) -> bool:
    return problem is not None and problem.accepted.startswith(UNKNOWN)


def _autos(raw: Any, path: str = "ds_npu") -> Iterator[tuple[str, Problem]]:
    """``"auto"`` anywhere in the section: accelerate refuses it for keys that it does not know."""
    if raw == "auto" or (isinstance(raw, list) and "auto" in raw):
        yield path, Problem(path, raw, "leave the key out for ds_npu to choose")
    elif isinstance(raw, dict):
        for key, value in raw.items():
            yield from _autos(value, f"{path}.{key}")
