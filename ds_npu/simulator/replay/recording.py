"""Reads what ``ds_npu sim --trace`` recorded: of each process, in its order, what the host did and put on streams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

HOST_TRACK = 0
"""The stream of what the host does itself."""


@dataclass(frozen=True)
class RecordedAction:
    """One line of a trace: a task that the host puts on a stream, or what the host does itself.

    Times are nanoseconds of virtual time, of the run that was recorded.
    """

    process: str
    device: int
    """Index of the NPU in the process."""
    stream: int
    number: int
    """Ascends in the order of the process's host."""
    name: str
    told: Mapping[str, Any]
    """The ``args`` of the line; docs/simulator.md explains them."""
    begun: int
    ended: int

    @property
    def dispatch(self) -> str:
        """How the host puts it on its stream: a key of pricing.DISPATCHES, or "none"."""
        return str(self.told["dispatch"])

    @property
    def kind(self) -> str | None:
        """The kind of a task that takes time; None for other actions."""
        return self.told.get("kind")

    @cached_property
    def event(self) -> int | None:
        """The number of the event that it records or waits for, in its process."""
        word, _, number = str(self.told["detail"]).partition(" ")
        return int(number) if word == "event" else None

    @property
    def records(self) -> bool:
        """Whether it is the record of an event."""
        return self.name == "record event"

    @property
    def of_host(self) -> bool:
        """Whether the host does it itself, or waits."""
        return self.stream == HOST_TRACK


@dataclass(frozen=True)
class RecordedRun:
    """The actions of each process of a run, in the order of its host."""

    processes: Mapping[str, tuple[RecordedAction, ...]]

    @cached_property
    def actions(self) -> tuple[RecordedAction, ...]:
        """The actions of all processes."""
        return tuple(action for each in self.processes.values() for action in each)


def read_recording(folder: Path) -> RecordedRun:
    """The recording in the files of ``folder``. Raises ValueError where there is none, or a line is no record."""
    processes = {path.stem: _actions(path) for path in sorted(folder.glob("*.json"))}
    found = {process: actions for process, actions in processes.items() if actions}
    if not found:
        raise ValueError(f"{folder}: no record of a run; ds_npu sim --trace {folder} -- ... writes one")
    return RecordedRun(found)


def _actions(path: Path) -> tuple[RecordedAction, ...]:
    found = []
    for number, line in enumerate(path.read_text().splitlines()[1:], 2):
        try:
            entry = json.loads(line.removesuffix(","))
            told = entry["args"]
            _ = told["dispatch"], told["detail"]
            begun, lasts = (round(entry[part] * 1000) for part in ("ts", "dur"))
            found.append(
                RecordedAction(
                    process=path.stem,
                    device=entry["pid"],
                    stream=entry["tid"],
                    number=told["place"],
                    name=entry["name"],
                    told=told,
                    begun=begun,
                    ended=begun + lasts,
                )
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: no record of a task ({error!r})") from error
    return tuple(sorted(found, key=lambda action: action.number))
