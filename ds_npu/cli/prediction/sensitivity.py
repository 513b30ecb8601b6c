"""How much a predicted step depends on each number of the machine, and on the model of contention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ds_npu.simulator.replay.recording import RecordedRun
from ds_npu.simulator.replay.replay import Replay
from ds_npu.topology.machine import TABLES, UNITS, Machine

WORSE = 0.1
"""The part by which a rate is lowered, or a time is lengthened."""
TIMES, RATES = ("s", "passes"), ("FLOP/s", "B/s")
NOT_TIMED = ("peak",)
"""Rates that no task is priced by."""
CONTENTION = "no contention"


@dataclass(frozen=True)
class Sensitivity:
    """Where the number ``name`` of the machine is worse, the step grows by the share ``growth``.

    ``evidence`` says where the number comes from, and its trust.
    """

    name: str
    growth: float
    evidence: str


def sensitivities(
    recording: RecordedRun, machine: Machine, step_seconds: float, tell: Callable[[str], None]
) -> tuple[Sensitivity, ...]:
    """Replay ``recording`` once for each number of ``machine``, and once without contention; the largest first.

    ``step_seconds``: the step on ``machine`` itself. ``tell`` is given lines about the progress.
    """
    evidence = dict(machine.evidence)
    names = [name for name, unit in UNITS.items() if unit in (*TIMES, *RATES) and name not in NOT_TIMED]
    found = []
    for count, name in enumerate(names, 1):
        tell(f"sensitivity {count} of {len(names) + 1}: {name}")
        seconds = _step_seconds(Replay(recording, worse(machine, name)))
        found.append(Sensitivity(name, seconds / step_seconds - 1, evidence[name]))
    tell(f"sensitivity {len(names) + 1} of {len(names) + 1}: {CONTENTION}")
    alone = _step_seconds(Replay(recording, machine, shares=False))
    found.append(Sensitivity(CONTENTION, alone / step_seconds - 1, "assumed"))
    return tuple(sorted(found, key=lambda each: -abs(each.growth)))


def worse(machine: Machine, name: str) -> Machine:
    """``machine`` with its number ``name`` worse by WORSE; of a table all rates."""
    factor = 1 + WORSE if UNITS[name] in TIMES else 1 - WORSE
    value: Any = getattr(machine, name)
    changed: Any = tuple((size, rate * factor) for size, rate in value) if name in TABLES else value * factor
    return replace(machine, **{name: changed})


def _step_seconds(replay: Replay) -> float:
    return max((span.ended for span in replay.run()), default=0) * 1e-9
