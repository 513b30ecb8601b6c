"""The names inside of ds_npu that goldens need: the one place to change when one of them moves.

Each is looked for in the modules that have or had it, so that the same scripts record the commits before and after.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from types import ModuleType
from unittest import mock

CHUNKS = ("ds_npu.memory.state_chunks",)
"""Modules in which ``CHUNK`` is the number of elements of a piece of the optimizer's state."""
LOGS = ("ds_npu.log",)
"""Modules in which ``warn_once`` keeps in a cache what was said."""


def _first(names: tuple[str, ...]) -> ModuleType:
    found = next(name for name in names if importlib.util.find_spec(name) is not None)
    return importlib.import_module(found)


def pieces_of_state(elements: int) -> AbstractContextManager[object]:
    """Let pieces of the optimizer's state have so many elements, so that a tiny model has several."""
    return mock.patch.object(_first(CHUNKS), "CHUNK", elements)


def say_warnings_again() -> None:
    """Let what is warned of once in a process be said again."""
    _first(LOGS).warn_once.cache_clear()
