"""Reads a DeepSpeed config file as DeepSpeed does (JSON and Hjson), with errors that say where."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import hjson

from ds_npu.config import ConfigError, Problem

Config = dict[str, Any]


def load(config: str | os.PathLike[str] | Config) -> Config:
    """The config as a dict; raises ConfigError for a file that cannot be read, with line and column of wrong syntax."""
    if isinstance(config, dict):
        return config
    duplicates: list[Problem] = []

    def unique(pairs: list[tuple[str, Any]]) -> Config:
        duplicates.extend(_duplicates(pairs))
        return dict(pairs)

    try:
        found = hjson.loads(_text(config), object_pairs_hook=unique)
    except hjson.HjsonDecodeError as error:
        place = f"{os.fspath(config)}, line {error.lineno}, column {error.colno}"
        line = error.doc.splitlines()[error.lineno - 1 : error.lineno]
        raise ConfigError([Problem(place, "".join(line).strip(), f"JSON or Hjson ({error.msg})")]) from None
    if not isinstance(found, dict):
        duplicates.append(Problem(os.fspath(config), found, "an object with DeepSpeed's keys"))
    if duplicates:
        raise ConfigError(duplicates)
    return dict(found)


def _text(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "bytes that are not UTF-8"
        raise ConfigError([Problem(os.fspath(path), reason, "a readable JSON or Hjson file")]) from None


def _duplicates(pairs: list[tuple[str, Any]]) -> list[Problem]:
    values: dict[str, list[Any]] = {}
    for key, value in pairs:
        values.setdefault(key, []).append(value)
    accepted = "one value: a key stands once in its object"
    return [Problem(key, found, accepted) for key, found in values.items() if len(found) > 1]
