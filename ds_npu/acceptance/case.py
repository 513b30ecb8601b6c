"""A case of the acceptance: its name, the NPUs it needs, the time it may take, and its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

GROUP_NAMES = ("operators", "collectives", "training", "speeds")


class Scope(NamedTuple):
    """The extent of a run: the NPUs it may use, and whether it takes the ``small`` cases alone."""

    npus: int
    small: bool


@dataclass(frozen=True)
class Case:
    """A case as the process that starts the ranks knows it; ``name`` is unique in its group."""

    name: str
    ranks: int = 1
    timeout_s: float = 120.0
    alone: bool = False
    """Whether it gets its own processes: its communicators would hold device memory until they end."""


@dataclass(frozen=True)
class Check:
    """One comparison with a reference: the error found, and the error that rounding explains, in one unit."""

    what: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """False also for an error that is not a number."""
        return self.error <= self.allowed

    @property
    def share(self) -> float:
        """The error as a share of the allowed one; above 1, or infinite, where the check fails."""
        if not self.passed:
            return self.error / self.allowed if self.allowed and math.isfinite(self.error) else math.inf
        return self.error / self.allowed if self.allowed else 0.0


@dataclass(frozen=True)
class Measured:
    """The findings of one rank in one case."""

    checks: Sequence[Check] = ()
    wrong: str = ""
    """A mistake that no number shows, in words; empty without one."""
    call_s: float | None = None
    """Seconds of one call on the device, the median of several; None where it was not timed."""
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Numbers of each step by name: losses and norms, found and expected."""


class NotRunError(Exception):
    """A case cannot be run here, and nothing is wrong with that; the text says why."""


@dataclass(frozen=True)
class Group:
    """Cases of one kind, which run in processes of their own: ``python -m <module>``."""

    name: str
    module: str
    purpose: str
    tolerance: str
    """How the allowed errors are derived, for the file."""
    advice: str
    cases: Callable[[Scope], Sequence[Case]]
    unmet: Callable[[], str | None] = lambda: None
    """Why none of its cases can be run here; None if they can."""
