"""The times of one profiled rank: activities, operators and calls of communicators, small enough to be sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from ds_npu.step_time.intervals import (
    BUBBLE,
    COPIES,
    EXPOSED,
    HOST,
    NANO,
    WAITS,
    Interval,
    TimedPart,
    axes_between,
    one_after_another,
    seconds_of,
)
from ds_npu.step_time.lanes import columns_of
from ds_npu.step_time.least_seconds import least_seconds
from ds_npu.step_time.trace import KINDS, CallKey, Header, OperatorTensors, RankTrace
from ds_npu.topology.degrees import NAMES, Degrees
from ds_npu.topology.machine import machine_named

UNNAMED = "a communicator without a name"
"""Stands for the axes of messages whose ranks a trace does not say."""
PIPELINE = NAMES["pp"]
MOST_OPERATORS = 200
"""Most operators in the times of a rank: the longest ones."""

Durations = Mapping[CallKey, int]
"""Nanoseconds of calls."""


class OperatorTime(NamedTuple):
    """All calls of one operator on a rank, in a window."""

    name: str
    kind: str
    calls: int
    seconds: float
    known_seconds: float
    """Seconds of the calls whose least time is known."""
    least_seconds: float
    """The least time of those calls on the machine."""


class RankTimes(NamedTuple):
    """The times of one rank in a window."""

    header: Header
    seconds: float
    activities: Mapping[str, float]
    """Seconds of each activity; they add up to the window."""
    operators: tuple[OperatorTime, ...]
    durations: Durations
    columns: tuple[Interval, ...]
    """Activities by columns of the picture."""
    message_columns: tuple[Interval, ...]


def durations_of(trace: RankTrace) -> dict[CallKey, int]:
    """Nanoseconds of each call of a communicator whose ranks are known."""
    return {key: message.ended - message.begun for key, message in trace.calls()}


def shortest(every: Iterable[Durations]) -> dict[CallKey, int]:
    """The shortest duration of each call that several ranks have recorded: that of the rank which came last."""
    found: dict[CallKey, list[int]] = defaultdict(list)
    for durations in every:
        for key, time in durations.items():
            found[key].append(time)
    return {key: min(times) for key, times in found.items() if len(times) > 1}


def rank_times(trace: RankTrace, least: Durations) -> RankTimes:
    """The times of ``trace``.

    ``least``: the shortest duration of each call; what the call took longer on this rank is a wait.
    """
    end = trace.ended - trace.begun
    parts = [
        TimedPart(p, name, begun - trace.begun, ended - trace.begun) for p, name, begun, ended in _parts(trace, least)
    ]
    found = one_after_another(_inside(parts, end), end)
    degrees = trace.header.degrees
    messages = [
        Interval(
            EXPOSED + call_axes(each.name, each.ranks, degrees),
            max(0, each.begun - trace.begun),
            min(end, each.ended - trace.begun),
        )
        for each in trace.messages
        if each.ended > trace.begun and each.begun < trace.ended
    ]
    return RankTimes(
        trace.header,
        end * NANO,
        seconds_of(found),
        tuple(sorted(_operators(trace), key=lambda each: -each.seconds)[:MOST_OPERATORS]),
        durations_of(trace),
        tuple(columns_of(found, end)),
        tuple(columns_of(messages, end)),
    )


def _inside(parts: Iterable[TimedPart], end: int) -> Iterator[TimedPart]:
    """``parts`` cut to the window."""
    for precedence, name, begun, ended in parts:
        if ended > 0 and begun < end:
            yield TimedPart(precedence, name, max(0, begun), min(end, ended))


def _parts(trace: RankTrace, least: Durations) -> Iterator[TimedPart]:
    """Computing hides communication, which hides copies, which hide waits for ranks that came later."""
    degrees = trace.header.degrees
    precedence = {kind: index for index, kind in enumerate(KINDS)}
    for operation in trace.operations:
        for begun, ended in operation.pieces:
            yield TimedPart(precedence[operation.kind], operation.kind, begun, ended)
    for begun, ended in trace.copies:
        yield TimedPart(len(KINDS) + 1, COPIES, begun, ended)
    for key, message in trace.calls():
        axes = call_axes(message.name, message.ranks, degrees)
        waits = BUBBLE if axes == PIPELINE else WAITS + axes
        took = least.get(key, 0 if waits == BUBBLE else message.ended - message.begun)
        sent = max(message.begun, message.ended - took)
        yield TimedPart(len(KINDS) + 2, waits, message.begun, sent)
        yield TimedPart(len(KINDS), EXPOSED + axes, sent, message.ended)
    for message in trace.messages:
        if not message.ranks:
            yield TimedPart(len(KINDS), EXPOSED + UNNAMED, message.begun, message.ended)


def call_axes(name: str, ranks: tuple[int, ...], degrees: Degrees) -> str:
    """The axes along which the ``ranks`` of a call differ, in words."""
    return (axes_between(ranks, "all_to_all" in name, degrees) or "one rank") if ranks else UNNAMED


def _operators(trace: RankTrace) -> Iterator[OperatorTime]:
    machine = machine_named(trace.header.machine)

    @cache
    def least(name: str, work: OperatorTensors | None) -> float | None:
        return least_seconds(machine, name, work)

    calls: dict[tuple[str, str], list[tuple[float, float | None]]] = defaultdict(list)
    for each in trace.operations:
        seconds = NANO * sum(ended - begun for begun, ended in each.pieces)
        calls[each.name, each.kind].append((seconds, least(each.name, each.work)))
    for (name, kind), found in calls.items():
        known = [(seconds, least) for seconds, least in found if least is not None]
        yield OperatorTime(
            name,
            kind,
            len(found),
            sum(seconds for seconds, _ in found),
            sum(seconds for seconds, _ in known),
            sum(least for _, least in known),
        )


def times_as_json(times: RankTimes) -> dict[str, Any]:
    """The figures of a rank, as a report's JSON has them; seconds of the whole window."""
    return {
        "rank": times.header.rank,
        "seconds": times.seconds,
        "activities": dict(times.activities),
        "host_bound_seconds": times.activities.get(HOST, 0.0),
        "operators": [each._asdict() for each in times.operators],
    }
