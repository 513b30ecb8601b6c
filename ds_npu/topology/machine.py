"""Speeds and sizes of machines, for estimates: read from ``machines.json``, where every number has its unit and source.

``die`` holds the numbers of every machine's ranks, the other sections what one machine adds. ds_npu measured none of
them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ds_npu.topology.degrees import Degrees

FILE = Path(__file__).with_name("machines.json")
UNITS = {
    "node": "ranks",
    "port": "B/s",
    "link": "B/s",
    "network": "B/s",
    "host": "B/s",
    "hbm": "B",
    "memory": "B/s",
    "matmul": "FLOP/s",
    "attention": "FLOP/s",
    "kernel": "s",
    "message": "s",
}
"""The unit of each number of a machine."""
COMMON = "die"


@dataclass(frozen=True)
class Machine:
    """Reached speeds of one rank, in one direction, and its sizes: bytes, FLOPs and seconds."""

    name: str
    node: int
    """Ranks that HCCS connects."""
    port: float
    """Bytes/s to all other ranks of the node together."""
    link: float
    """Bytes/s to one other rank of the node."""
    network: float
    """Bytes/s to ranks of other nodes."""
    host: float
    """Bytes/s between the memory of the device and pinned memory of its host."""
    hbm: int
    """Bytes of device memory."""
    memory: float
    """Bytes/s that copies and sums read and write."""
    matmul: float
    """FLOP/s of large products of matrices in bf16."""
    attention: tuple[tuple[int, float], ...]
    """FLOP/s of the attention kernel, forward and backward, by the keys of a call, ascending."""
    kernel: float
    """Seconds that the device takes for a kernel however small it is."""
    message: float
    """Seconds that a message or collective takes however small it is."""

    def near(self, degrees: Degrees) -> int:
        """How many consecutive context ranks share a node in every context group; a divisor of their number."""
        if degrees.world_size <= self.node:
            return degrees.cp
        block = math.gcd(degrees.cp * degrees.tp, self.node)
        return block // degrees.tp if block % degrees.tp == 0 else 1

    def seconds(self, near_bytes: float, near_peers: int, far_bytes: float) -> float:
        """Seconds to send to ``near_peers`` ranks of the node and, at the same time, to other nodes."""
        within = near_bytes / min(self.port, self.link * near_peers) if near_peers else 0.0
        return max(within, far_bytes / self.network)

    def attention_rate(self, keys: float) -> float:
        """FLOP/s of an attention call on ``keys`` keys: between two entries of the table linear in their logarithm."""
        (fewest, slowest), (_, fastest) = self.attention[0], self.attention[-1]
        if keys <= fewest:
            return slowest
        for (low, slow), (high, fast) in pairwise(self.attention):
            if keys <= high:
                return slow + (fast - slow) * math.log(keys / low) / math.log(high / low)
        return fastest


def machine_from(name: str, entries: Mapping[str, Any]) -> Machine:
    """The Machine ``name`` from its part of ``machines.json``: ``{field: {"value", "unit", "source"}}``.

    Raises ValueError for a field that is missing or unknown, and for an entry without a positive number (a table of
    them by ascending keys for "attention"), the field's unit and a source.
    """
    if wrong := entries.keys() ^ UNITS.keys():
        raise ValueError(f"{FILE.name}: {name}: missing or unknown: {', '.join(sorted(wrong))}")
    return Machine(name, **{field: _value(f"{FILE.name}: {name}.{field}", field, entries[field]) for field in UNITS})


def _value(where: str, field: str, entry: Any) -> Any:
    if not isinstance(entry, dict) or entry.keys() != {"value", "unit", "source"}:
        raise ValueError(f"{where}: has not exactly a value, a unit and a source")
    if entry["unit"] != UNITS[field]:
        raise ValueError(f"{where}: the unit is {entry['unit']!r}, not {UNITS[field]!r}")
    if not isinstance(entry["source"], str) or not entry["source"].strip():
        raise ValueError(f"{where}: a number without a source")
    value = entry["value"]
    if field != "attention":
        return _positive(where, value)
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{where}: {value!r} is no table of numbers by keys")
    table = tuple((int(keys), _positive(where, rate)) for keys, rate in value.items())
    if [keys for keys, _ in table] != sorted({keys for keys, _ in table}):
        raise ValueError(f"{where}: the keys of the table do not ascend")
    return table


def _positive(where: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{where}: {value!r} is no positive number")
    return value


_ENTRIES = json.loads(FILE.read_text())
MACHINES = {name: machine_from(name, _ENTRIES[COMMON] | own) for name, own in _ENTRIES.items() if name != COMMON}
A2, A3 = MACHINES["A2"], MACHINES["A3"]


def machine_of(device_name: str) -> Machine:
    """The Machine of an NPU by its name in torch_npu; A2 for an unknown one. Source: CANN, names of A3 chips."""
    return A3 if device_name.startswith("Ascend910_93") else A2
