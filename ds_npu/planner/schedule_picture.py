"""A run of a pipeline schedule as a picture: a row for each rank, time from left to right; as text and as SVG."""

from __future__ import annotations

from collections.abc import Iterator

from ds_npu.parallel.pipeline.schedule import Action, Kind, Schedule
from ds_npu.parallel.pipeline.timeline import Timeline
from ds_npu.svg import drawing, element, rect, text, title

COLOURS = {
    Kind.FORWARD: ("#8ecae6", "#bde0ef", "#dcf0f8", "#ecf7fb"),
    Kind.BACKWARD: ("#52b788", "#95d5b2", "#b7e4c7", "#d8f3dc"),
    Kind.BACKWARD_INPUT: ("#f6bd60", "#fad9a1", "#fce9c8", "#fdf3e1"),
    Kind.BACKWARD_WEIGHT: ("#b392ac", "#d1b3c4", "#e8c2ca", "#f3dde2"),
    Kind.RECOMPUTE: ("#adb5bd", "#ced4da", "#dee2e6", "#e9ecef"),
    Kind.SEND_STATES: ("#1d3557",),
    Kind.SEND_GRADIENTS: ("#c1121f",),
}
"""Colours of an action by the stage's number among those of its rank, paler and paler."""
WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "gradient of inputs",
    Kind.BACKWARD_WEIGHT: "gradient of weights",
    Kind.RECOMPUTE: "forward again",
    Kind.SEND_STATES: "states sent",
    Kind.SEND_GRADIENTS: "gradients sent",
}
MARKS = ("", "'", '"')
"""Marks that follow the number of a micro-batch in text, by the stage's number among those of its rank."""
WIDEST, ROW, MARGIN, LABEL, SIDE = 1600, 26, 20, 64, 110
"""Pixels: the time axis at most, a rank's height, around all, names of ranks, the column at the right."""


def headline(name: str, run: Timeline) -> str:
    """The sizes, the makespan and the bubble of ``run`` in one line."""
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
        cells = ""
        for action in row:
            begin, end = (round(at / unit) * width for at in (run.start[action], run.end(action)))
            cells = cells.ljust(begin, ".") + labels[action].ljust(end - begin)
        lines.append(f"rank {rank:<3} {cells}".rstrip())
    return "\n".join(lines)


def schedule_svg(name: str, run: Timeline) -> str:
    """An SVG file, to look at or to put into a talk."""
    schedule = run.schedule
    scale = min(WIDEST / max(run.makespan, 1e-9), 24 / max(run.costs.forward, 1e-9))
    width = round(LABEL + scale * run.makespan + SIDE + 2 * MARGIN)
    top = 3 * MARGIN
    bottom = 3 * MARGIN + ROW * len(schedule.rows)
    lines = [text(MARGIN, MARGIN + 8, headline(name, run), font_size=14, font_weight="bold")]
    for rank in range(len(schedule.rows)):
        lines += _row(run, rank, top + ROW * rank, scale)
    lines += _transfers(run, top, scale)
    lines.append(text(MARGIN + LABEL + scale * run.makespan + 10, top - 8, "most kept at once", fill="#555"))
    lines += _legend(run, bottom + MARGIN)
    return drawing(width, bottom + 3 * MARGIN, lines, font_size=11)


def _row(run: Timeline, rank: int, top: int, scale: float) -> Iterator[str]:
    left = MARGIN + LABEL
    right = MARGIN + LABEL + scale * run.makespan
    yield text(MARGIN, top + ROW / 2 + 3, f"rank {rank}")
    yield rect(left, top, scale * run.makespan, ROW - 4, fill="#f1f1f1")
    for action in run.schedule.rows[rank]:
        x = left + scale * run.start[action]
        wide = scale * run.costs.of(action)
        index = _own_stages(run.schedule, rank).index(action.stage)
        colour = COLOURS[action.kind][min(index, len(COLOURS[action.kind]) - 1)]
        yield rect(x, top, wide, ROW - 4, fill=colour, stroke="white")
        yield text(x + wide / 2, top + ROW / 2 + 2, f"{action.micro_batch}", text_anchor="middle")
    yield text(right + 10, top + ROW / 2 + 3, f"{run.schedule.peak_activations[rank]}", fill="#555")


def _transfers(run: Timeline, top: int, scale: float) -> Iterator[str]:
    for send, receive in run.schedule.transfers.values():
        colour = COLOURS[send.kind][0]
        wide = min(1.0, scale * run.costs.forward / 12)
        # States and gradients that leave at once are drawn next to each other.
        left = MARGIN + LABEL + (1 if send.kind is Kind.SEND_GRADIENTS else -1)
        begin = left + scale * run.start[send]
        arrival = left + scale * run.end(send)
        y, end = (top + ROW * run.schedule.rank_of[each.stage] + ROW / 2 - 2 for each in (send, receive))
        line = element("line", x1=begin, y1=y, x2=arrival, y2=end, stroke=colour, stroke_width=wide)
        dot = element("circle", cx=arrival, cy=end, r=2 * wide, fill=colour)
        yield element("g", title(f"{send} to rank {run.schedule.rank_of[receive.stage]}") + line + dot)


def _legend(run: Timeline, y: int) -> Iterator[str]:
    x, kinds = MARGIN, {each.kind for each in run.start}
    for kind in (each for each in Kind if each in kinds):
        yield rect(x, y, 12, 12, fill=COLOURS[kind][0])
        yield text(x + 18, y + 10, WORDS[kind])
        x += 40 + 7 * len(WORDS[kind])
    words = "numbers are micro-batches; a paler colour is a later stage of the rank; grey is waiting"
    yield text(MARGIN, y + 28, words, fill="#555")


def _own_stages(schedule: Schedule, rank: int) -> list[int]:
    return sorted({action.stage for action in schedule.rows[rank]})


def _label(schedule: Schedule, action: Action) -> str:
    index = _own_stages(schedule, schedule.rank_of[action.stage]).index(action.stage)
    mark = MARKS[index] if index < len(MARKS) else f"/{index}"
    return f"{action.kind.value}{action.micro_batch}{mark}"
