"""Profiles of machines: speeds and sizes for estimates, read from ``machines.json``.

Every number has its unit, its source, its mark (measured, claimed by the vendor, derived or assumed) and how far to
trust it. A machine that is ``like`` another one has its numbers but for those that it gives itself. ds_npu measured
none of them. The simulator's C++ takes the same numbers (``csrc/machine.h``) and computes the same seconds.
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

Table = tuple[tuple[int, float], ...]
"""Rates by a size, ascending."""
FILE = Path(__file__).with_name("machines.json")
UNITS = {
    "cores": "cores",
    "peak": "FLOP/s",
    "matmul": "FLOP/s",
    "matmul_float32": "FLOP/s",
    "memory": "B/s",
    "attention": "FLOP/s",
    "hbm": "B",
    "kernel": "s",
    "sorting_passes": "passes",
    "message": "s",
    "node": "ranks",
    "port": "B/s",
    "link": "B/s",
    "network": "B/s",
    "hop": "s",
    "host": "B/s",
    "dispatch": "s",
    "dispatch_fused": "s",
    "dispatch_autograd": "s",
    "dispatch_collective": "s",
    "dispatch_event": "s",
    "launch": "s",
    "stream_tasks": "tasks",
    "queue_tasks": "tasks",
}
"""The unit of each number of a machine."""
TABLES = ("memory", "attention")
"""The numbers that are tables."""
INTEGERS = ("cores", "hbm", "sorting_passes", "node", "stream_tasks", "queue_tasks")
"""The numbers that count something."""
MARKS, TRUST = ("measured", "claimed", "derived", "assumed"), ("high", "medium", "low")
LIKE = "like"
TILE = (128, 256)
"""Rows and columns, or columns and rows, of a result that one cube core computes at a time. Source: hardware.md, 4."""


@dataclass(frozen=True)
class Machine:
    """Reached speeds of one rank, in one direction, and its sizes: bytes, FLOPs and seconds."""

    name: str
    cores: int
    """Cube cores."""
    peak: float
    """FLOP/s of the cube cores in bf16, of which an MFU is a share."""
    matmul: float
    """FLOP/s of products of matrices in 16 bits, on whole tiles."""
    matmul_float32: float
    """FLOP/s of products of matrices in float32."""
    memory: Table
    """Bytes/s that an operator reads and writes, by the bytes of its tensors."""
    attention: Table
    """FLOP/s of the attention kernel, forward and backward, by the keys of a call."""
    hbm: int
    """Bytes of device memory."""
    kernel: float
    """Seconds that the device takes for a kernel, to which its arithmetic is added."""
    sorting_passes: int
    """How often an operator that sorts reads and writes its tensors."""
    message: float
    """Seconds that a message or collective takes however small it is."""
    node: int
    """Ranks that HCCS connects."""
    port: float
    """Bytes/s to all other ranks of the node together."""
    link: float
    """Bytes/s to one other rank of the node."""
    network: float
    """Bytes/s to ranks of other nodes."""
    hop: float
    """Seconds of each step of a collective between nodes."""
    host: float
    """Bytes/s between the memory of the device and pinned memory of its host."""
    dispatch: float
    """Seconds of the host for an operator called from Python."""
    dispatch_fused: float
    """The same for one of torch_npu's fused operators."""
    dispatch_autograd: float
    """The same for an operator called by autograd's thread."""
    dispatch_collective: float
    """The same for a collective or message."""
    dispatch_event: float
    """The same for the record or wait of an event."""
    launch: float
    """Seconds to put a dispatched task on its stream, by a thread of torch_npu, while the host dispatches the next."""
    stream_tasks: int
    """Tasks that a stream holds; a launch waits until there is room."""
    queue_tasks: int
    """Dispatched tasks that wait to be launched; a dispatch waits until there is room."""
    evidence: tuple[tuple[str, str], ...]
    """The mark and trust of each number."""

    def near(self, degrees: Degrees) -> int:
        """How many consecutive context ranks share a node in every context group; a divisor of their number."""
        if degrees.world_size <= self.node:
            return degrees.cp
        block = math.gcd(degrees.cp * degrees.tp, self.node)
        return block // degrees.tp if block % degrees.tp == 0 else 1

    def sending_seconds(self, near_bytes: float, near_peers: int, far_bytes: float) -> float:
        """Seconds to send to ``near_peers`` ranks of the node and, at the same time, to other nodes."""
        within = near_bytes / min(self.port, self.link * near_peers) if near_peers else 0.0
        return max(within, far_bytes / self.network)

    def operator_seconds(self, arithmetic: float, moved: float) -> float:
        """Seconds of a kernel with ``arithmetic`` seconds of the cube cores that reads and writes ``moved`` bytes."""
        return self.kernel + max(arithmetic, self.memory_seconds(moved))

    def memory_seconds(self, moved: float) -> float:
        """Seconds to read and write ``moved`` bytes."""
        return moved / interpolated(self.memory, moved)

    def product_seconds(self, rows: int, columns: int, inner: int, itemsize: int, count: int = 1) -> float:
        """Seconds of arithmetic of ``count`` products [rows, inner] @ [inner, columns], on whole tiles of each core."""
        tiles = min(math.ceil(rows / high) * math.ceil(columns / wide) for high, wide in (TILE, TILE[::-1]))
        rounds = math.ceil(count * tiles / self.cores)
        rate = self.matmul if itemsize <= 2 else self.matmul_float32
        return rounds * self.cores * 2 * math.prod(TILE) * inner / rate

    def collective_seconds(self, kind: str, n: float, near: int, nodes: int) -> float:
        """Seconds of a collective of ``COLLECTIVES`` over ``near`` ranks on each of ``nodes`` nodes.

        ``n`` is the bytes of the whole buffer: before a reduce-scatter or all-reduce, after an all-gather.
        """
        ranks = near * nodes
        hops = math.ceil(math.log2(nodes))
        seconds = self.message
        for level, amount in COLLECTIVES[kind]:
            part = n / near if amount == "n/g" else n
            if level == "near":
                seconds += self.sending_seconds(part * (near - 1) / near, near - 1, 0.0)
            elif level == "far":
                seconds += self.sending_seconds(0.0, 0, part * (nodes - 1) / nodes) + hops * self.hop
            else:
                seconds += self.sending_seconds(part * (near - 1) / ranks, near - 1, part * (ranks - near) / ranks)
                seconds += (nodes - 1) * self.hop
        return seconds

    def attention_seconds(self, flop: float, keys: float) -> float:
        """Seconds of arithmetic of an attention call of ``flop`` FLOP on ``keys`` keys."""
        return flop / interpolated(self.attention, keys)


def interpolated(table: Table, size: float) -> float:
    """The rate for ``size``: between two entries of ``table`` linear in the size's logarithm."""
    (fewest, first), (_, last) = table[0], table[-1]
    if size <= fewest:
        return first
    for (low, before), (high, after) in pairwise(table):
        if size <= high:
            return before + (after - before) * math.log(size / low) / math.log(high / low)
    return last


def machine_from(name: str, entries: Mapping[str, Any], file: str = FILE.name) -> Machine:
    """The Machine ``name`` from its part of ``file``: ``{field: {"value", "unit", "mark", "trust", "source"}}``.

    Raises ValueError for a field that is missing or unknown, and for an entry without a positive number (for "memory"
    and "attention" a table of them by ascending sizes), the field's unit, a mark, its trust and a source.
    """
    if wrong := entries.keys() ^ UNITS.keys():
        raise ValueError(f"{file}: {name}: missing or unknown: {', '.join(sorted(wrong))}")
    values = {number: _value(f"{file}: {name}.{number}", number, entries[number]) for number in UNITS}
    evidence = tuple((number, f"{entries[number]['mark']}, trust {entries[number]['trust']}") for number in UNITS)
    return Machine(name, **values, evidence=evidence)


def _value(where: str, field: str, entry: Any) -> Any:
    if not isinstance(entry, dict) or entry.keys() != {"value", "unit", "mark", "trust", "source"}:
        raise ValueError(f"{where}: has not exactly a value, a unit, a mark, a trust and a source")
    for part, accepted in (("unit", (UNITS[field],)), ("mark", MARKS), ("trust", TRUST)):
        if entry[part] not in accepted:
            raise ValueError(f"{where}: the {part} is {entry[part]!r}, not {' or '.join(map(repr, accepted))}")
    if not isinstance(entry["source"], str) or not entry["source"].strip():
        raise ValueError(f"{where}: a number without a source")
    value = entry["value"]
    if field in INTEGERS and not isinstance(value, int):
        raise ValueError(f"{where}: {value!r} is no positive number of {UNITS[field]}")
    if field not in TABLES:
        return _positive(where, value)
    if not isinstance(value, dict) or not value or not all(size.isdecimal() and size.isascii() for size in value):
        raise ValueError(f"{where}: {value!r} is no table of numbers by sizes")
    table = tuple((int(size), _positive(where, rate)) for size, rate in value.items())
    if [size for size, _ in table] != sorted({size for size, _ in table}):
        raise ValueError(f"{where}: the sizes of the table do not ascend")
    return table


def _positive(where: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{where}: {value!r} is no positive number")
    return value


def entries_of(profile: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The entries of the machine ``name`` of a profile: its own, and those of the machine that it is like."""
    own = dict(profile[name])
    like = own.pop(LIKE, None)
    return own if like is None else entries_of(profile, like) | own


_PROFILES = json.loads(FILE.read_text())
MACHINES = {name: machine_from(name, entries_of(_PROFILES["machines"], name)) for name in _PROFILES["machines"]}
COLLECTIVES: dict[str, list[tuple[str, str]]] = {
    kind: [(level, amount) for level, amount in phases] for kind, phases in _PROFILES["collectives"]["phases"].items()
}
"""The phases of each collective, one after the other: a level ("near" is within nodes, "far" between them, "both" at
the same time), and its bytes: n, those of the whole buffer, or n / g, with g ranks of the group on a node."""
A2, A3 = MACHINES["A2"], MACHINES["A3"]


def machine_named(text: str) -> Machine:
    """The machine of that name, or of a file of ``ds_npu calibrate``. Raises ValueError where there is neither."""
    if text in MACHINES:
        return MACHINES[text]
    known = f"there are {', '.join(MACHINES)}, and files of ds_npu calibrate"
    try:
        ((name, own),) = json.loads(Path(text).read_text())["machines"].items()
        like = own.get(LIKE)
        entries = (entries_of(_PROFILES["machines"], like) if like is not None else {}) | own
    except OSError as error:
        raise ValueError(f"found {text!r}, which is no machine and no file that can be read; {known}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"found {text!r}, a file that has no profile of one machine; {known}") from error
    return machine_from(name, {field: entry for field, entry in entries.items() if field != LIKE}, text)


def machine_of(device_name: str) -> Machine:
    """The Machine of an NPU by its name in torch_npu; A2 for an unknown one. Source: CANN, names of A3 chips."""
    if device_name.startswith("Ascend910_93"):
        return A3
    return MACHINES.get(device_name.removeprefix("Ascend"), A2)
