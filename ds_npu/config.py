"""The base of every part of the ``"ds_npu"`` section, and the one error that says what is wrong with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the section: typed, frozen, and closed (it refuses keys it does not know)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a config: where, what stands there, and what would be accepted."""

    path: str
    """The full key path, as ``ds_npu.parallel.tensor``."""
    found: Any
    accepted: str

    def __str__(self) -> str:
        return f"{self.path}: found {json.dumps(self.found, default=repr)}; {self.accepted}"


class ConfigError(ValueError):
    """Everything that is wrong with a config, at once; ``of`` says which."""

    def __init__(self, problems: list[Problem], of: str = "the DeepSpeed config") -> None:
        self.problems = tuple(problems)
        count = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        super().__init__(f"{count} in {of}:\n" + "\n".join(f"  {problem}" for problem in problems))
