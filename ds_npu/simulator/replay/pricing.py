"""Prices of recorded tasks on a machine: nanoseconds of a task that runs alone, and the resources that it then uses.

The seconds are those that the simulator's C++ computes of the same numbers (``csrc/work.cpp`` and
``csrc/hccl/account.cpp``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ds_npu.simulator.replay.recording import RecordedAction
from ds_npu.topology.machine import COLLECTIVES, Machine

DISPATCHES = {
    "operator": "dispatch",
    "fused": "dispatch_fused",
    "autograd": "dispatch_autograd",
    "collective": "dispatch_collective",
    "event": "dispatch_event",
}
"""For each kind of call, the field of Machine with the seconds that the host takes to dispatch it."""
CUBE, MEMORY, PORT, NETWORK, HOST_LINK = "cube", "memory", "port", "network", "host link"
"""The resources that tasks of an NPU share: cube cores, memory, and ports to its node, other nodes and its host."""


class Message(NamedTuple):
    """One of the messages of a task: to or from rank ``peer`` of its communicator."""

    sends: bool
    peer: int
    number: int
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Price:
    """``nanoseconds`` of a task alone on the machine, and the part of each resource of its NPU that it then uses."""

    nanoseconds: int
    shares: Mapping[str, float]


def nanoseconds(seconds: float) -> int:
    """Whole nanoseconds, rounded away from zero at a half, as C++ does."""
    return math.floor(seconds * 1e9 + 0.5)


def dispatch_nanoseconds(machine: Machine, dispatch: str) -> int:
    """How long the host takes to put a task on its stream."""
    return nanoseconds(float(getattr(machine, DISPATCHES[dispatch])))


def price(machine: Machine, action: RecordedAction) -> Price:
    """The price of a task that costs something and is no message, or of a copy that the host makes."""
    return _priced(*(_collective if action.kind == "collective" else _operator)(machine, action.told))


def message_price(machine: Machine, action: RecordedAction, message: Message) -> Price:
    """The price of one message of a task, whose other messages may be on their way at the same time."""
    npus = action.told["npus"]
    peer = npus[message.peer]
    if peer // machine.node == npus[action.told["rank"]] // machine.node:
        sending = message.size / machine.link
        used = {PORT: message.size / machine.port, _link(peer): sending}
    else:
        sending = message.size / machine.network
        used = {NETWORK: sending}
    used[MEMORY] = machine.memory_seconds(message.size) if message.size else 0.0
    return _priced(machine.message + sending, used)


def messages_of(action: RecordedAction) -> list[Message]:
    """The messages of a task."""
    return [Message(bool(sends), *rest) for sends, *rest in action.told.get("messages", ())]


def _priced(seconds: float, used: Mapping[str, float]) -> Price:
    shares = {resource: min(1.0, part / seconds) for resource, part in used.items() if part > 0}
    return Price(nanoseconds(seconds), shares)


def _operator(machine: Machine, told: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    moved = told.get("moved", told["read"] + told["written"])
    if told["kind"] == "sorting":
        moved *= machine.sorting_passes
    cube = machine.product_seconds(*told["products"]) if "products" in told else 0.0
    if "keys" in told:
        cube = machine.attention_seconds(told["flop"], told["keys"])
    sent, peers = told.get("sent", (0, 0))
    sending = machine.sending_seconds(sent, peers, 0.0) if peers else 0.0
    to_host = told.get("host", 0) / machine.host
    meanwhile = max(cube, machine.message + sending if peers else 0.0, to_host)
    used = {CUBE: cube, HOST_LINK: to_host, PORT: sending, MEMORY: machine.memory_seconds(moved) if moved else 0.0}
    return machine.operator_seconds(meanwhile, moved) if moved else machine.kernel + meanwhile, used


def _collective(machine: Machine, told: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    npus = told["npus"]
    nodes = len({npu // machine.node for npu in npus})
    near = math.ceil(len(npus) / nodes)
    seconds = machine.collective_seconds(told["collective"], told["bytes"], near, nodes)
    moved = told["read"] + told["written"]
    within, between = _sent(told["collective"], told["bytes"], near, nodes)
    used = {PORT: within / machine.port, NETWORK: between / machine.network}
    used[MEMORY] = machine.memory_seconds(moved) if moved else 0.0
    own = npus[told["rank"]]
    for npu in npus:
        if npu != own and npu // machine.node == own // machine.node:
            used[_link(npu)] = within / (near - 1) / machine.link
    return seconds, used


def _link(npu: int) -> str:
    """The link of an NPU to another one of its node."""
    return f"link to NPU {npu}"


def _sent(kind: str, size: float, near: int, nodes: int) -> tuple[float, float]:
    """Bytes that a rank sends in all phases of a collective: within its node, and between nodes."""
    ranks, within, between = near * nodes, 0.0, 0.0
    for level, amount in COLLECTIVES[kind]:
        part = size / near if amount == "n/g" else size
        within += {"near": part * (near - 1) / near, "both": part * (near - 1) / ranks}.get(level, 0.0)
        between += {"far": part * (nodes - 1) / nodes, "both": part * (ranks - near) / ranks}.get(level, 0.0)
    return within, between
