"""What `ds_npu sim --trace` wrote: the tasks of each NPU, and which of them had to wait for which."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

_MESSAGE = re.compile(r"(send|receive) number (\d+) (?:to|from) rank (\d+), (\d+) x (\w+)")


class Message(NamedTuple):
    """``way`` is what the other rank's message has too: communicator, sender, receiver and number."""

    sends: bool
    way: tuple[str, int, int, int]
    type: str


@dataclass(frozen=True)
class Task:
    """``place`` counts the tasks of ``process``, in the order in which the host put them on streams; times in us."""

    process: str
    device: int
    stream: int
    place: int
    name: str
    detail: str
    begun: float
    ended: float

    @cached_property
    def messages(self) -> list[Message]:
        found = []
        communicator, _, rest = self.detail.removeprefix("communicator ").partition(", rank ")
        rank, _, calls = rest.partition(": ")
        for kind, number, peer, _, of_type in _MESSAGE.findall(calls):
            ends = (int(rank), int(peer)) if kind == "send" else (int(peer), int(rank))
            found.append(Message(kind == "send", (communicator, *ends, int(number)), of_type))
        return found


Point = tuple[Task, bool]
"""A task's begin (False) or end."""


class Trace:
    """All tasks of a run, by place within each process."""

    def __init__(self, folder: Path) -> None:
        self.tasks = [task for path in sorted(folder.glob("*.json")) for task in _tasks(path)]

    def of_device(self, device: int) -> list[Task]:
        return [task for task in self.tasks if task.device == device]

    @cached_property
    def ends(self) -> dict[tuple[str, int, int, int], list[Task]]:
        """Of the way of each message the tasks at both ends."""
        found = defaultdict(list)
        for task in self.tasks:
            for message in task.messages:
                found[message.way].append(task)
        return found

    @cached_property
    def _next(self) -> dict[Point, list[Point]]:
        """What cannot be before a point: the end of its task, the stream's next, who waits for its event, and a message
        at the other rank, of which neither ends before both have begun."""
        found: dict[Point, list[Point]] = defaultdict(list)
        streams, recorded = defaultdict(list), {}
        for task in self.tasks:
            found[task, False].append((task, True))
            streams[task.process, task.device, task.stream].append(task)
            if task.name == "record event":
                recorded[task.process, task.detail] = task
        for tasks in streams.values():
            for one, following in itertools.pairwise(tasks):
                found[one, True].append((following, False))
        for task in self.tasks:
            if task.name == "wait for event":
                found[recorded[task.process, task.detail], True].append((task, True))
        for one, other in self.ends.values():
            found[one, False].append((other, True))
            found[other, False].append((one, True))
        return found

    def after(self, task: Task) -> set[Point]:
        """The points that cannot be before the end of ``task``, whatever the streams' order."""
        found: set[Point] = set()
        left: list[Point] = [(task, True)]
        while left:
            for point in self._next[left.pop()]:
                if point not in found:
                    found.add(point)
                    left.append(point)
        return found


def _tasks(path: Path) -> Iterator[Task]:
    found = []
    for line in path.read_text().splitlines()[1:]:
        entry = json.loads(line.removesuffix(","))
        told = entry["args"]
        found.append(
            Task(
                path.stem,
                entry["pid"],
                entry["tid"],
                told["place"],
                entry["name"],
                told["detail"],
                entry["ts"],
                entry["ts"] + entry["dur"],
            )
        )
    return iter(sorted(found, key=lambda task: task.place))
