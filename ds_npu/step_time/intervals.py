"""The activities of a device in a step, one after the other, made of work that overlaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from ds_npu.topology.degrees import DENSE, EXPERT, NAMES, Axis, Degrees

COPIES, BUBBLE, HOST = "copies to or from the host", "bubble", "waits for the host"
EXPOSED, WAITS = "communicates: ", "waits for ranks: "
"""Prefixes of an activity; the axes follow whose ranks communicate, or whose slowest rank is waited for."""
NANO = 1e-9


class Interval(NamedTuple):
    """An activity from ``begun`` to ``ended`` nanoseconds."""

    activity: str
    begun: int
    ended: int


class TimedPart(NamedTuple):
    """Work from ``begun`` to ``ended`` nanoseconds; that of a smaller ``precedence`` hides others at the same time."""

    precedence: int
    activity: str
    begun: int
    ended: int


def one_after_another(parts: Iterable[TimedPart], end: int, after: str = HOST) -> tuple[Interval, ...]:
    """The activity at each time from 0 to ``end``.

    Communication along several axes at one time is an activity of its own. Where there is nothing, the device waits for
    its host; behind the last part it does what ``after`` says.
    """
    edges: list[tuple[int, int, int, str]] = []
    for precedence, activity, begun, ended in parts:
        if ended > begun:
            edges += [(begun, 1, precedence, activity), (ended, -1, precedence, activity)]
    edges.sort()
    running: Counter[tuple[int, str]] = Counter()
    found: list[Interval] = []
    now = 0

    def pass_to(time: int, activity: str) -> None:
        nonlocal now
        if time > now:
            if found and found[-1].activity == activity:
                found[-1] = Interval(activity, found[-1].begun, time)
            else:
                found.append(Interval(activity, now, time))
            now = time

    for time, change, precedence, activity in edges:
        pass_to(min(time, end), _first(running) if running else HOST)
        running[precedence, activity] += change
        if not running[precedence, activity]:
            del running[precedence, activity]
    pass_to(end, after)
    return tuple(found)


def _first(running: Iterable[tuple[int, str]]) -> str:
    """The activity with precedence, of one axis or more."""
    least = min(precedence for precedence, _ in running)
    found = sorted(activity for precedence, activity in running if precedence == least)
    if len(found) == 1 or not all(each.startswith(EXPOSED) for each in found):
        return found[0]
    return EXPOSED + " and ".join(each.removeprefix(EXPOSED) for each in found)


def seconds_of(intervals: Iterable[Interval]) -> dict[str, float]:
    """Seconds of each activity."""
    found: Counter[str] = Counter()
    for activity, begun, ended in intervals:
        found[activity] += ended - begun
    return {activity: time * NANO for activity, time in found.items()}


def mean_shares(each: Sequence[dict[str, float]], seconds: float) -> dict[str, float]:
    """Shares of ``seconds`` by activity, the mean over the ranks in ``each``, the largest first."""
    found: dict[str, float] = {}
    for own in each:
        for activity, time in own.items():
            found[activity] = found.get(activity, 0.0) + time / len(each) / seconds
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def by_axes(shares: dict[str, float], prefix: str) -> dict[str, float]:
    """The entries of ``shares`` whose activity begins with ``prefix``, by what follows it."""
    return {name.removeprefix(prefix): part for name, part in shares.items() if name.startswith(prefix)}


@cache
def axes_between(ranks: tuple[int, ...], exchanges: bool, degrees: Degrees) -> str:
    """The names of the axes along which the global ``ranks`` differ; ``exchanges``: they send experts their tokens."""
    found = [degrees.coordinates(rank) for rank in ranks]

    def along(view: Sequence[Axis]) -> list[Axis]:
        return [axis for axis in view if len({each[axis] for each in found}) > 1]

    dense, expert = along(DENSE), along(EXPERT)
    if len(ranks) == degrees.world_size and len(dense) > 1:
        return "all ranks"
    # Without ranks for experts the expert view only has other names for the ranks.
    shards_experts = degrees.ep * degrees.etp > 1
    axes = expert if (exchanges and "ep" in expert) or (shards_experts and len(expert) < len(dense)) else dense
    return " x ".join(NAMES[axis] for axis in axes)
