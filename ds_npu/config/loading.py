"""Reading of a DeepSpeed config file as DeepSpeed reads it (JSON and Hjson), with errors that say where."""

from __future__ import annotations

import functools
import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hjson

from ds_npu.config.problems import Config, ConfigError, Problem

MOST_BYTES = 2**20
MOST_HJSON_CHARACTERS = 2**16
"""Characters of the largest config file that is no JSON: hjson's time grows with the square of some texts."""
DEEPEST = 64
LARGEST = "a number of at most 1.8e308"
SHALLOW = f"at most {DEEPEST} objects and lists inside of one another"
ENCODINGS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "gzip", b"PK": "zip"}
"""Encodings other than UTF-8, by the bytes with which such a file begins."""
KINDS: dict[str, Callable[[int], bool]] = {
    "a directory": stat.S_ISDIR,
    "a pipe": stat.S_ISFIFO,
    "a socket": stat.S_ISSOCK,
    "a device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
}


@dataclass(frozen=True)
class NoNumber:
    """Stands for a number that cannot be read, or that JSON does not have."""

    text: str
    accepted: str

    def __repr__(self) -> str:
        return self.text


class Repeating(dict[str, Any]):
    """An object that has a key more than once."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        values: dict[str, list[Any]] = {}
        for key, value in pairs:
            values.setdefault(key, []).append(value)
        self.repeated = {key: found for key, found in values.items() if len(found) > 1}


def load(config: str | os.PathLike[str] | Config) -> Config:
    """The config as a dict; raises ConfigError for a file that cannot be read, with line and column of wrong syntax."""
    return config if isinstance(config, dict) else load_text(read_text(config), os.fspath(config))


def load_text(text: str, name: str) -> Config:
    """The config of ``text``, which errors call ``name``; raises ConfigError."""
    found = _parsed(text, name)
    problems = [] if found and isinstance(found, dict) else [Problem(name, found, "an object with DeepSpeed's keys")]
    problems += flaws(found)
    if problems:
        raise ConfigError(problems)
    return dict(found)


def read_text(
    path: str | os.PathLike[str],
    wanted: str = "a readable file of JSON or Hjson, a regular one, as it is read more than once",
) -> str:
    """The text of a regular file in UTF-8 of at most MOST_BYTES; raises ConfigError where it is none."""
    file = Path(path)
    found, reason = b"", None
    try:
        mode = file.stat().st_mode
        reason = next((kind for kind, matches in KINDS.items() if matches(mode)), None)
        if reason is None:
            with file.open("rb") as stream:
                found = stream.read(MOST_BYTES + 1)
            reason = "an empty file" if not found.strip() else None
            reason = f"more than {MOST_BYTES:,} bytes" if len(found) > MOST_BYTES else reason
    except (OSError, ValueError) as error:
        # A ValueError is about a NUL in the path.
        reason = str(error.strerror if isinstance(error, OSError) else error)
    if reason is not None:
        raise ConfigError([Problem(str(file), reason, wanted)])
    try:
        return found.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        named = next((f" (they look like {name})" for start, name in ENCODINGS.items() if found.startswith(start)), "")
        location = f"{file}, byte {error.start + 1:,}"
        raise ConfigError([Problem(location, f"bytes that are not UTF-8{named}", wanted)]) from None


def json_of(text: str) -> Any:
    """The JSON of ``text``, its numbers as hjson reads them; a NoNumber stands for one that cannot be read.

    Raises json.JSONDecodeError, and RecursionError for thousands of objects inside of one another.
    """
    return json.loads(
        text,
        object_pairs_hook=_object,
        parse_int=_integer,
        parse_float=_number,
        parse_constant=functools.partial(NoNumber, accepted="a number: JSON has no NaN and no Infinity"),
    )


def flaws(config: Any) -> Iterator[Problem]:
    """Mistakes at any depth of any config: repeated keys, numbers that cannot be read, nesting without end."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), config)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, NoNumber):
            yield Problem(_joined(path), value, value.accepted)
        if not isinstance(value, dict | list):
            continue
        if len(path) > DEEPEST:
            yield Problem(_joined(path), value, SHALLOW)
            return
        if isinstance(value, Repeating):
            accepted = "one value: a key stands once in its object"
            yield from (Problem(_joined((*path, key)), each, accepted) for key, each in value.repeated.items())
        items = value.items() if isinstance(value, dict) else ((f"[{at}]", each) for at, each in enumerate(value))
        waiting += reversed([((*path, str(key)), each) for key, each in items])


def _joined(path: tuple[str, ...]) -> str:
    return ".".join(path).replace(".[", "[")


def _parsed(text: str, name: str) -> Any:
    try:
        try:
            return json_of(text)
        except json.JSONDecodeError as error:
            wrong = error
        if len(text) > MOST_HJSON_CHARACTERS:
            raise _syntax_error(text, name, wrong, f"JSON, or Hjson of at most {MOST_HJSON_CHARACTERS:,} characters")
        return hjson.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except RecursionError:
        raise ConfigError([Problem(name, "more", SHALLOW)]) from None
    except OverflowError:
        raise ConfigError([Problem(name, "a number above 1.8e308", LARGEST)]) from None
    except (hjson.HjsonDecodeError, IndexError) as error:
        theirs = "a comment or a text that does not end"  # There hjson reads past the end.
        if isinstance(error, hjson.HjsonDecodeError):
            theirs = f"{error.msg} in line {error.lineno}, column {error.colno}"
        raise _syntax_error(text, name, wrong, f"JSON or Hjson (JSON: {wrong.msg}; Hjson: {theirs})") from None


def _syntax_error(text: str, name: str, wrong: json.JSONDecodeError, accepted: str) -> ConfigError:
    found = text[wrong.pos :].split("\n", 1)[0].strip() or "the end of the line"
    return ConfigError([Problem(f"{name}, line {wrong.lineno}, column {wrong.colno}", found, accepted)])


def _object(pairs: list[tuple[str, Any]]) -> Config:
    found = dict(pairs)
    return found if len(found) == len(pairs) else Repeating(pairs)


def _integer(text: str) -> int | NoNumber:
    try:
        return int(text)
    except ValueError:
        return NoNumber(text, "an integer of at most 4,300 digits")


def _number(text: str) -> int | float | NoNumber:
    found = float(text)
    if math.isinf(found):
        return NoNumber(text, LARGEST)
    return int(found) if found.is_integer() and abs(found) < 1e10 else found
