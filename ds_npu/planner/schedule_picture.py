"""A run of a pipeline schedule as a picture: a row for each rank, time from left to right; as text and as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from ds_npu.parallel.pipeline.schedule import Action, Kind, Schedule
from ds_npu.parallel.pipeline.timeline import Timeline

COLOURS = {
    Kind.FORWARD: ("#8ecae6", "#bde0ef", "#dcf0f8", "#ecf7fb"),
    Kind.BACKWARD: ("#52b788", "#95d5b2", "#b7e4c7", "#d8f3dc"),
    Kind.BACKWARD_INPUT: ("#f6bd60", "#fad9a1", "#fce9c8", "#fdf3e1"),
    Kind.BACKWARD_WEIGHT: ("#b392ac", "#d1b3c4", "#e8c2ca", "#f3dde2"),
    Kind.RECOMPUTE: ("#adb5bd", "#ced4da", "#dee2e6", "#e9ecef"),
}
"""By the stage's number among those of its rank, paler and paler."""
WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "gradient of inputs",
    Kind.BACKWARD_WEIGHT: "gradient of weights",
    Kind.RECOMPUTE: "forward again",
}
MARKS = ("", "'", '"')
"""Behind the number of a micro-batch in text, by the stage's number among those of its rank; then that number."""
WIDEST, ROW, MARGIN, LABEL, SIDE = 1600, 26, 20, 64, 110
"""Pixels: the time axis at most, a rank's height, around all, names of ranks, what stands at the right."""


def headline(name: str, run: Timeline) -> str:
    """What ``run`` comes to, in one line."""
    schedule = run.schedule
    work = max(map(run.work, range(len(schedule.rows))), default=0.0)
    chunks = max((len(_own_stages(schedule, rank)) for rank in range(len(schedule.rows))), default=0)
    stages = "1 stage" if chunks == 1 else f"{chunks} stages"
    share = f" ({run.bubble / work:.1%} of the work)" if work else ""
    return (
        f"{name}: {len(schedule.rows)} ranks with {stages} each, {schedule.micro_batches} micro-batches; time "
        f"{run.makespan:g}, a rank waits at most {run.bubble:g}{share} between its first and last action"
    )


def schedule_text(name: str, run: Timeline) -> str:
    """Lines for a terminal: F0 is the forward of micro-batch 0, F0' of the rank's second stage; dots are waiting."""
    unit = min(map(run.costs.of, run.schedule.actions()), default=1.0) or 1.0
    labels = {each: _label(run.schedule, each) for each in run.schedule.actions()}
    width = max(map(len, labels.values()), default=1) + 1
    lines = [headline(name, run)]
    for rank, row in enumerate(run.schedule.rows):
        text = ""
        for action in row:
            begin, end = (round(at / unit) * width for at in (run.start[action], run.end(action)))
            text = text.ljust(begin, ".") + labels[action].ljust(end - begin)
        lines.append(f"rank {rank:<3} {text}".rstrip())
    return "\n".join(lines)


def schedule_svg(name: str, run: Timeline) -> str:
    """An SVG file, to look at or to put into a talk."""
    schedule = run.schedule
    scale = min(WIDEST / max(run.makespan, 1e-9), 24 / max(run.costs.forward, 1e-9))
    width = round(LABEL + scale * run.makespan + SIDE + 2 * MARGIN)
    top = 3 * MARGIN
    height = top + ROW * len(schedule.rows) + 3 * MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="{MARGIN + 8}" font-size="14" font-weight="bold">{escape(headline(name, run))}</text>',
    ]
    for rank in range(len(schedule.rows)):
        lines += _row(run, rank, top + ROW * rank, scale)
    peaks = MARGIN + LABEL + scale * run.makespan + 10
    lines.append(f'<text x="{peaks:.1f}" y="{top - 8}" fill="#555">most kept at once</text>')
    lines += _legend(schedule, top + ROW * len(schedule.rows) + MARGIN)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _row(run: Timeline, rank: int, top: int, scale: float) -> Iterator[str]:
    left = MARGIN + LABEL
    yield f'<text x="{MARGIN}" y="{top + ROW / 2 + 3}">rank {rank}</text>'
    yield f'<rect x="{left}" y="{top}" width="{scale * run.makespan:.1f}" height="{ROW - 4}" fill="#f1f1f1"/>'
    for action in run.schedule.rows[rank]:
        x, wide = left + scale * run.start[action], scale * run.costs.of(action)
        place = _own_stages(run.schedule, rank).index(action.stage)
        colour = COLOURS[action.kind][min(place, len(COLOURS[action.kind]) - 1)]
        yield (
            f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{ROW - 4}" fill="{colour}" stroke="white"/>'
            f'<text x="{x + wide / 2:.1f}" y="{top + ROW / 2 + 2}" text-anchor="middle">{action.micro_batch}</text>'
        )
    x = left + scale * run.makespan + 10
    yield f'<text x="{x:.1f}" y="{top + ROW / 2 + 3}" fill="#555">{run.schedule.peak_activations[rank]}</text>'


def _legend(schedule: Schedule, y: int) -> Iterator[str]:
    x = MARGIN
    for kind in Kind:
        if any(each.kind is kind for each in schedule.actions()):
            yield f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[kind][0]}"/>'
            yield f'<text x="{x + 18}" y="{y + 10}">{WORDS[kind]}</text>'
            x += 40 + 7 * len(WORDS[kind])
    yield (
        f'<text x="{x}" y="{y + 10}" fill="#555">'
        "numbers are micro-batches; a paler colour is a later stage of the rank; grey is waiting</text>"
    )


def _own_stages(schedule: Schedule, rank: int) -> list[int]:
    return sorted({action.stage for action in schedule.rows[rank]})


def _label(schedule: Schedule, action: Action) -> str:
    place = _own_stages(schedule, schedule.rank_of[action.stage]).index(action.stage)
    mark = MARKS[place] if place < len(MARKS) else f"/{place}"
    return f"{action.kind.value}{action.micro_batch}{mark}"
