"""Lanes of activities over time, of the pictures of steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ds_npu.step_time.intervals import BUBBLE, COPIES, HOST, Interval
from ds_npu.svg import drawing, group, rect, text, title

COLUMNS, LEFT, MARGIN, LANE, GAP = 1200, 90, 24, 22, 14
"""Pixels: the time axis, names of ranks, around all, a lane, between ranks."""
COMPUTES = "computes"
FIXED = {COMPUTES: "#52b788", COPIES: "#adb5bd", BUBBLE: "#f1f1f1", HOST: "#e9c46a"}
OTHERS = ("#8ecae6", "#b392ac", "#f4a261", "#3a86c8", "#c1121f", "#fb9a99", "#cab2d6")
"""Colours of other activities, in their order."""


class RankLanes(NamedTuple):
    """The activities of a rank, and its communication, hidden or not."""

    rank: int
    activities: Sequence[Interval]
    messages: Sequence[Interval]


def lanes_svg(heading: str, ranks: Sequence[RankLanes], end: int, names: Iterable[str]) -> str:
    """An SVG file: of each rank a lane of its activities from 0 to ``end`` ns, and one of its communication.

    ``names``: activities in the order of their colours.
    """
    every = [*names, *(each.activity for rank in ranks for each in rank.messages)]
    others = [name for name in dict.fromkeys(every) if name not in FIXED]
    colours = {name: colour for name, colour in FIXED.items() if name != COMPUTES or name in every}
    colours |= {name: OTHERS[index % len(OTHERS)] for index, name in enumerate(others)}
    lines = [text(MARGIN, MARGIN + 6, heading, font_size=16, font_weight="bold")]
    y = 2 * MARGIN
    for each in ranks:
        lines.append(text(MARGIN, y + LANE - 7, f"rank {each.rank}", font_weight="bold"))
        lines.append(group(_lane(each.activities, colours, end, y), data_lane=f"rank {each.rank}"))
        lines.append(text(MARGIN, y + 2 * LANE - 8, "messages", fill="#555"))
        lines.append(group(_lane(each.messages, colours, end, y + LANE)))
        y += 2 * LANE + GAP
    lines += _legend(colours, y)
    return drawing(COLUMNS + LEFT + 2 * MARGIN, y + 3 * MARGIN, lines, font_size=12)


def columns_of(intervals: Iterable[Interval], end: int, count: int = COLUMNS) -> Iterator[Interval]:
    """The activity that takes most of each of ``count`` columns between 0 and ``end``; equal neighbours are joined."""
    columns: list[Counter[str]] = [Counter() for _ in range(count)]
    for activity, start, stop in intervals:
        first, last = (min(count - 1, at * count // end) for at in (start, stop))
        for column in range(first, last + 1):
            begun = max(start, column * end // count)
            ended = min(stop, (column + 1) * end // count)
            columns[column][activity] += max(0, ended - begun)
    found = [column.most_common(1)[0][0] if column else None for column in columns]
    begin = 0
    for column in range(1, count + 1):
        if column == count or found[column] != found[begin]:
            activity_there = found[begin]
            if activity_there is not None:
                yield Interval(activity_there, begin, column)
            begin = column


def _lane(intervals: Iterable[Interval], colours: Mapping[str, str], end: int, y: int) -> Iterator[str]:
    for activity, begin, column in columns_of(intervals, end):
        box = rect(MARGIN + LEFT + begin, y, column - begin, LANE - 3, fill=colours[activity])
        yield group([title(activity), box])


def _legend(colours: Mapping[str, str], y: int) -> Iterator[str]:
    x = MARGIN
    for name, colour in colours.items():
        yield rect(x, y, 12, 12, fill=colour, stroke="#888")
        yield text(x + 18, y + 11, name)
        x += 36 + 7 * len(name)
        if x > COLUMNS:
            x, y = MARGIN, y + 20
