"""The tasks of a step on simulated NPUs by stream, in words that do not change from run to run."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import defaultdict
from pathlib import Path

FOLDER = "DS_NPU_SIM_TRACE"
"""The variable in which `ds_npu sim --trace` names its folder."""
COMMUNICATOR = re.compile(r"communicator (\S+), rank")
COUNTED = re.compile(r" number \d+|: call \d+")
"""Counters since the communicator was opened; the order on a stream says as much."""


def trace_file() -> Path | None:
    """The file into which this process's tasks are traced; None without `--trace`."""
    folder = os.environ.get(FOLDER, "")
    return Path(folder, f"{os.getpid()}.json") if folder else None


def size_of(path: Path | None) -> int:
    return path.stat().st_size if path is not None and path.exists() else 0


def streams_of(path: Path, begin: int) -> dict[str, list[str]]:
    """The tasks behind byte ``begin`` of a trace, by stream, in the order in which the host put them there.

    Streams are numbered among those at work. An event is called by the stream that recorded it and its number there, a
    communicator by its order in the step; what repeats is counted.
    """
    with path.open() as file:
        file.seek(begin)
        entries = [json.loads(line.rstrip("\n").removesuffix(",")) for line in file if line.startswith("{")]
    entries.sort(key=lambda each: each["args"]["place"])
    streams = {tid: number for number, tid in enumerate(sorted({each["tid"] for each in entries}))}
    events: dict[str, str] = {}
    counts: dict[int, int] = defaultdict(int)
    communicators: dict[str, int] = {}
    found: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        stream, name, detail = streams[entry["tid"]], entry["name"], entry["args"]["detail"]
        if name == "record event":
            counts[stream] += 1
            events[detail] = f"{counts[stream]} of stream {stream}"
            detail = ""
        elif name == "wait for event":
            detail = events.get(detail, "of an earlier step")
        for each in COMMUNICATOR.findall(detail):
            number = communicators.setdefault(each, len(communicators))
            detail = COUNTED.sub("", detail.replace(each, str(number)))
        found[f"stream {stream}"].append(f"{name} {detail}".strip())
    return {stream: _counted(tasks) for stream, tasks in found.items()}


def _counted(tasks: list[str]) -> list[str]:
    groups = ((task, len(list(each))) for task, each in itertools.groupby(tasks))
    return [task if count == 1 else f"{task} x{count}" for task, count in groups]
