"""DeepSpeed's own engines in this process, whose configs have no section of ds_npu."""

from __future__ import annotations

import threading
import weakref
from typing import Any

_ENGINES: weakref.WeakSet[Any] = weakref.WeakSet()
_CHANGING = threading.Lock()
"""Held while _ENGINES is read or changed: watches read it in threads of their own."""


def note_plain_engine(engine: Any) -> None:
    """Note ``engine``, which may be incomplete."""
    with _CHANGING:
        _ENGINES.add(engine)


def plain_counters() -> tuple[int, int]:
    """The sums, over all noted engines, of optimizer steps and of micro-batches that have ended."""
    with _CHANGING:
        states = [each.__dict__ for each in _ENGINES]
    return sum(each.get("global_steps", 0) for each in states), sum(each.get("micro_steps", 0) for each in states)
