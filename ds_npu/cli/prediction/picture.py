"""A predicted step as an SVG picture and as a trace for Perfetto."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from ds_npu.cli.prediction.figures import (
    BUBBLE,
    COMPUTES,
    COPIES,
    EXPOSED,
    HOST,
    MESSAGES,
    Interval,
    Prediction,
    axes_of,
)
from ds_npu.simulator.replay.replay import Span
from ds_npu.svg import drawing, group, rect, text, title

COLUMNS, LEFT, MARGIN, LANE, GAP = 1200, 90, 24, 22, 14
"""Pixels: the time axis, names of ranks, around all, a lane, between ranks."""
FIXED = {COMPUTES: "#52b788", COPIES: "#adb5bd", BUBBLE: "#f1f1f1", HOST: "#e9c46a"}
OTHERS = ("#8ecae6", "#b392ac", "#f4a261", "#3a86c8", "#c1121f", "#fb9a99", "#cab2d6")
"""Colours of communication and waits, in the order of their seconds."""


def step_svg(prediction: Prediction) -> str:
    """An SVG file: of each present rank a lane of what its NPU does, and one of its communication, hidden or not."""
    colours = _colours(prediction)
    end = max(1, round(prediction.step_seconds * 1e9))
    lines = [
        text(
            MARGIN,
            MARGIN + 6,
            f"One step of {prediction.step_seconds:.3f} s: {prediction.degrees.world_size:,} NPUs of "
            f"{prediction.machine.name}, predicted",
            font_size=16,
            font_weight="bold",
        )
    ]
    y = 2 * MARGIN
    for stage in prediction.stages:
        lines.append(text(MARGIN, y + LANE - 7, f"rank {stage.report.rank}", font_weight="bold"))
        lines.append(group(_lane(stage.intervals, colours, end, y), data_lane=f"rank {stage.report.rank}"))
        own = [span for span in prediction.spans if span.action.process == stage.report.process]
        hidden = _communication(own, prediction)
        lines.append(text(MARGIN, y + 2 * LANE - 8, "messages", fill="#555"))
        lines.append(group(_lane(hidden, colours, end, y + LANE)))
        y += 2 * LANE + GAP
    lines += _legend(colours, y)
    return drawing(COLUMNS + LEFT + 2 * MARGIN, y + 3 * MARGIN, lines, font_size=12)


def _communication(spans: Iterable[Span], prediction: Prediction) -> list[Interval]:
    return [
        Interval(EXPOSED + axes_of(span.action, prediction.degrees), span.begun, span.ended)
        for span in spans
        if span.action.kind in MESSAGES
    ]


def _colours(prediction: Prediction) -> dict[str, str]:
    names = list(prediction.shares())
    for span in prediction.spans:
        if span.action.kind in MESSAGES:
            names.append(EXPOSED + axes_of(span.action, prediction.degrees))
    others = [name for name in dict.fromkeys(names) if name not in FIXED]
    return FIXED | {name: OTHERS[index % len(OTHERS)] for index, name in enumerate(others)}


def _lane(intervals: Iterable[Interval], colours: dict[str, str], end: int, y: int) -> Iterator[str]:
    """Rectangles of the activity that takes most of each column, runs of one colour joined."""
    columns: list[Counter[str]] = [Counter() for _ in range(COLUMNS)]
    for each in intervals:
        first, last = (min(COLUMNS - 1, at * COLUMNS // end) for at in (each.begun, each.ended))
        for column in range(first, last + 1):
            begun, ended = max(each.begun, column * end // COLUMNS), min(each.ended, (column + 1) * end // COLUMNS)
            columns[column][each.activity] += max(0, ended - begun)
    found = [column.most_common(1)[0][0] if column else None for column in columns]
    begin = 0
    for column in range(1, COLUMNS + 1):
        if column == COLUMNS or found[column] != found[begin]:
            activity = found[begin]
            if activity is not None:
                box = rect(MARGIN + LEFT + begin, y, column - begin, LANE - 3, fill=colours[activity])
                yield group([title(activity), box])
            begin = column


def _legend(colours: dict[str, str], y: int) -> Iterator[str]:
    x = MARGIN
    for name, colour in colours.items():
        yield rect(x, y, 12, 12, fill=colour, stroke="#888")
        yield text(x + 18, y + 11, name)
        x += 36 + 7 * len(name)
        if x > COLUMNS:
            x, y = MARGIN, y + 20


def write_trace(prediction: Prediction, file: Path) -> None:
    """Write the replayed step in Chrome's trace format, which ui.perfetto.dev shows: a process for each rank."""
    ranks = {stage.report.process: stage.report.rank for stage in prediction.stages}
    events = [
        {
            "ph": "X",
            "pid": ranks[span.action.process],
            "tid": span.action.stream,
            "ts": span.begun / 1e3,
            "dur": (span.ended - span.begun) / 1e3,
            "name": span.action.name,
            "args": dict(span.action.told),
        }
        for span in prediction.spans
    ]
    file.write_text(json.dumps({"traceEvents": events}))
