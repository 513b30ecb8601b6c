"""Cases that measure what a machine's profile asks for, and the numbers of a profile that their seconds give."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ds_npu.acceptance.case import Case, Scope
from ds_npu.topology.machine import Machine, Table

SERIES = "speed"
"""Name of the number in a report: seconds of a call, or bytes of device memory."""
MIB = 1 << 20
NODE = 8
"""NPUs of a node; the speed of a port is measured with all of them."""
HEADS, WIDTH = 32, 128
"""Heads of a measured attention, and their width."""
TOLERANCE = "nothing is compared: each call is timed, the median of several"


@dataclass(frozen=True)
class SpeedCase(Case):
    """Measures ``field`` of a profile by calls of one ``kind``.

    Where the field is a table, the calls' ``size`` is the key.
    """

    kind: str = "kernel"
    field: str = "kernel"
    size: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Samples, tokens, heads and their width of an attention."""
        return 1, self.size, HEADS, WIDTH

    @property
    def flop(self) -> int:
        """FLOP of an attention without a mask, forward (2 products) and backward (5)."""
        samples, tokens, heads, width = self.shape
        return 14 * samples * heads * tokens * tokens * width


def speed_cases(scope: Scope) -> list[SpeedCase]:
    """The kernel's least time first, which is part of all others; collectives where there are NPUs for them."""
    side, message = (256, MIB) if scope.small else (8192, 256 * MIB)
    found = [
        SpeedCase("the least time of a kernel"),
        SpeedCase("device memory", kind="hbm", field="hbm"),
        *(
            SpeedCase(f"a product of matrices of {side:,} x {side:,} in {dtype}", kind=dtype, field=field, size=side)
            for dtype, field in (("bfloat16", "matmul"), ("float32", "matmul_float32"))
        ),
        *(
            SpeedCase(f"{size:,} bytes read and written", kind="memory", field="memory", size=size)
            for size in ((MIB,) if scope.small else (48 * MIB, 150 * MIB, 192 * MIB, 1024 * MIB))
        ),
        *(
            SpeedCase(
                f"attention on {size:,} keys, forward and backward", kind="attention", field="attention", size=size
            )
            for size in ((128,) if scope.small else (1024, 2048, 4096, 8192, 16384, 32768))
        ),
        SpeedCase("a copy from pinned memory", kind="host", field="host", size=message),
    ]
    if scope.npus > 1:
        found.append(SpeedCase("the least time of a collective", 2, kind="all_reduce", field="message"))
        found.append(SpeedCase("a link between two NPUs", 2, kind="all_gather", field="link", size=message))
    if scope.npus >= NODE:
        found.append(SpeedCase(f"a port to {NODE - 1} NPUs", NODE, kind="all_gather", field="port", size=message))
    return found


def calibrated(machine: Machine, measured: Iterable[tuple[SpeedCase, float]]) -> Machine:
    """``machine`` with the numbers that follow from ``measured``: the seconds of each case (device memory: the bytes).

    A number may follow from those of earlier cases. Raises ValueError for a case that took no longer than the least
    time of its kind, and for a time that is not finite.
    """
    tables: dict[str, dict[int, float]] = {}
    for case, seconds in measured:
        found = _number(machine, case, seconds)
        if not 0 < found < math.inf:
            raise ValueError(f"{case.name}: {seconds:g} s are no longer than the least time of such a call")
        if isinstance(getattr(machine, case.field), tuple):
            tables.setdefault(case.field, {})[case.size] = found
        else:
            machine = _with(machine, case.field, found)
    for field, table in tables.items():
        machine = _with(machine, field, tuple(sorted(table.items())))
    return machine


def _with(machine: Machine, field: str, value: float | Table) -> Machine:
    changed: dict[str, Any] = {field: value}
    return replace(machine, **changed)


def _number(machine: Machine, case: SpeedCase, seconds: float) -> float:
    if case.field == "hbm":
        return int(seconds)
    if case.field in ("kernel", "message"):
        return seconds
    if case.kind == "host":
        return case.size / seconds
    if case.kind == "all_gather":
        return case.size * (case.ranks - 1) / case.ranks / (seconds - machine.message)
    arithmetic = seconds - machine.kernel
    if case.kind == "memory":
        return case.size / arithmetic
    if case.kind == "attention":
        return case.flop / arithmetic
    itemsize = 2 if case.kind == "bfloat16" else 4
    rate = float(getattr(machine, case.field))
    return rate * machine.product_seconds(case.size, case.size, case.size, itemsize) / arithmetic
