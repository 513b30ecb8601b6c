"""The mistakes in a config, as one error with a line for each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]
"""A DeepSpeed config, as its file has it."""
MOST_CHARACTERS = 200
"""Most characters of a path or a value that a message shows; the middle of more is left out."""
MOST_PROBLEMS = 50


@dataclass(frozen=True)
class Problem:
    """One mistake in a config: its path, as ``ds_npu.parallel.tensor``, the value there, and the accepted values."""

    path: str
    found: Any
    accepted: str

    def __str__(self) -> str:
        return f"{printable(self.path)}: found {shown(self.found)}; {self.accepted}"


class ConfigError(ValueError):
    """All mistakes in a config, at once; ``of`` names the config."""

    def __init__(self, problems: list[Problem], of: str = "the DeepSpeed config") -> None:
        self.problems = tuple(problems)
        count = "1 mistake" if len(problems) == 1 else f"{len(problems):,} mistakes"
        lines = [f"  {problem}" for problem in problems[:MOST_PROBLEMS]]
        if len(problems) > MOST_PROBLEMS:
            lines.append(f"  and {len(problems) - MOST_PROBLEMS:,} more")
        super().__init__(f"{count} in {printable(of)}:\n" + "\n".join(lines))


def printable(text: str, most: int = MOST_CHARACTERS) -> str:
    """``text`` on one line, shortened to ``most`` characters, with control characters and lone surrogates escaped."""
    short = shortened(text, most)
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in short)


def shown(value: Any) -> str:
    """``value`` as JSON in ASCII, shortened; its type where JSON cannot say it."""
    if isinstance(value, int) and value.bit_length() > 4 * MOST_CHARACTERS:
        return f"an integer of {value.bit_length():,} bits"
    try:
        return shortened(json.dumps(value, default=repr))
    except (TypeError, ValueError, RecursionError):
        return f"an object of type {type(value).__name__}"


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """``text`` without its middle where it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... {text[-half:]} ({len(text):,} characters)"
