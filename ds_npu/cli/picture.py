"""The grid of ranks as a picture: nodes with their ranks, once for each axis, the ranks of a group in one colour."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ds_npu.cli.layout import ZERO
from ds_npu.svg import drawing, group, rect, text, title
from ds_npu.topology.degrees import DENSE, EXPERT, NAMES, Axis, Degrees
from ds_npu.topology.machine import Machine

Axes = tuple[Axis, ...]

COLOURS = (
    *("#a6cee3", "#fdbf6f", "#b2df8a", "#fb9a99", "#cab2d6", "#ffff99"),
    *("#80cdc1", "#f4a582", "#d9d9d9", "#fccde5", "#bc80bd", "#8da0cb"),
)
"""Colours of groups, repeated after the last one; each rank also shows the number of its group."""
SHARED: dict[Axis, str] = {
    "tp": "they hold shards of the same weights and work on the same samples",
    "cp": "they hold the same weights and shards of the same sequences",
    "dp": "they hold the same weights and work on other samples",
    "pp": "they are the stages of one copy of the model",
    "edp": "they hold copies of the same experts",
    "ep": "they hold other experts of the same layers",
    "etp": "they hold shards of the same experts",
}

ROW = 8
"""Ranks in a row of a node."""
MOST_ROWS = 32
"""Rows that are drawn; the middle of more is left out."""
CELL, LINE, GAP, MARGIN, LABEL, TITLE, WIDTH = 50, 34, 8, 24, 76, 58, 520
"""Pixels: width and height of a rank, between nodes, around panels, of a node's name, a panel's title, a panel."""
HEADING, STRONG, PLAIN, SMALL = (
    {"font_size": "16", "font_weight": "bold"},
    {"font_size": "13", "font_weight": "bold"},
    {"font_size": "12"},
    {"font_size": "9", "text_anchor": "middle"},
)


@dataclass(frozen=True)
class _Node:
    number: int
    ranks: range


@dataclass(frozen=True)
class _Panel:
    """A drawing of the nodes, each group along ``axes`` in one colour; without axes, each rank's coordinates."""

    axes: Axes
    title: str
    meaning: str


def layout_svg(degrees: Degrees, zero_stage: int | None, machine: Machine) -> str:
    """An SVG file with a panel of all ranks in their nodes for each axis of more than one rank, and for ZeRO.

    Ranks fill the nodes of ``machine`` one after the other, as under launchers.
    """
    nodes = _nodes(degrees.world_size, machine.node)
    panels = [*_panels(degrees, zero_stage, nodes, machine.node)]
    columns = min(2, len(panels))
    height = TITLE + sum(_rows(node) * LINE + GAP for node in nodes) + MARGIN
    lines = [text(MARGIN, MARGIN + 6, _headline(degrees, machine), **HEADING)]
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        corner = (MARGIN + column * WIDTH, 2 * MARGIN + row * height)
        lines.append(group(_drawn(panel, nodes, degrees, corner), data_panel=" ".join(panel.axes)))
    return drawing(columns * WIDTH + MARGIN, -(-len(panels) // columns) * height + 3 * MARGIN, lines)


def _headline(degrees: Degrees, machine: Machine) -> str:
    count = -(-degrees.world_size // machine.node)
    nodes = "1 node" if count == 1 else f"{count:,} nodes"
    left_out = "; those in the middle are left out" if degrees.world_size > ROW * MOST_ROWS else ""
    return f"{degrees.world_size:,} ranks on {nodes} of {machine.name}, {machine.node} ranks a node{left_out}"


def _nodes(world_size: int, size: int) -> list[_Node | None]:
    """The nodes, or parts of them, that are drawn; None stands for what is left out."""
    starts = range(0, world_size, ROW)
    drawn: list[int | None] = [*starts]
    if len(starts) > MOST_ROWS:
        drawn = [*starts[: MOST_ROWS // 2], None, *starts[-MOST_ROWS // 2 :]]
    nodes: list[_Node | None] = []
    for key, rows in itertools.groupby(drawn, key=lambda start: None if start is None else start // size):
        firsts = [start for start in rows if start is not None]
        if key is None:
            nodes.append(None)
        else:
            nodes.append(_Node(key, range(firsts[0], min(firsts[-1] + ROW, (key + 1) * size, world_size))))
    return nodes


def _rows(node: _Node | None) -> int:
    return 1 if node is None else -(-len(node.ranks) // ROW)


def _panels(degrees: Degrees, zero_stage: int | None, nodes: list[_Node | None], size: int) -> Iterator[_Panel]:
    shown = _shown(degrees)
    sizes = " x ".join(str(degrees.size(axis)) for axis in shown)
    title = f"place of each rank: {'.'.join(shown)} of {sizes}" if shown else "one rank"
    yield _Panel((), title, "in the other pictures a colour and number is a group")
    drawn = [rank for node in nodes if node is not None for rank in node.ranks]
    expert: Axes = EXPERT[1:] if degrees.ep * degrees.etp > 1 else ()
    found: list[tuple[Axes, str]] = [((axis,), SHARED[axis]) for axis in (*reversed(DENSE), *reversed(expert))]
    if degrees.dp > 1 and degrees.cp > 1:
        found.append((("dp", "cp"), ZERO[zero_stage]))
    for axes, meaning in found:
        ranks = math.prod(degrees.size(axis) for axis in axes)
        if ranks > 1:
            groups = {_group(degrees, axes, rank): rank for rank in drawn}
            most = max(_spread(degrees, axes, rank, size) for rank in groups.values())
            where = "each within a node" if most == 1 else f"each over {most:,} nodes"
            name = f"{' * '.join(NAMES[axis] for axis in axes)} ({' * '.join(axes)})"
            yield _Panel(axes, f"{name}: {degrees.world_size // ranks:,} groups of {ranks:,}, {where}", meaning)


def _shown(degrees: Degrees) -> Axes:
    return tuple(axis for axis in DENSE if degrees.size(axis) > 1)


def _group(degrees: Degrees, axes: Axes, rank: int) -> int:
    """The index of the group of ``rank`` in ``degrees.groups(*axes)``."""
    coordinates, number = degrees.coordinates(rank), 0
    for axis in DENSE if set(axes) <= set(DENSE) else EXPERT:
        if axis not in axes:
            number = number * degrees.size(axis) + coordinates[axis]
    return number


def _spread(degrees: Degrees, axes: Axes, rank: int, size: int) -> int:
    """How many nodes of ``size`` ranks have a rank of the group along ``axes`` that contains ``rank``."""
    box = degrees.box(*axes)
    first = rank - sum(rank // stride % count * stride for stride, count in box)
    steps = itertools.product(*(range(0, stride * count, stride) for stride, count in box))
    return len({(first + sum(step)) // size for step in steps})


def _drawn(panel: _Panel, nodes: list[_Node | None], degrees: Degrees, corner: tuple[int, int]) -> Iterator[str]:
    x, y = corner
    yield text(x, y + 20, panel.title, **STRONG)
    yield text(x, y + 40, panel.meaning, **PLAIN)
    y += TITLE
    for node in nodes:
        if node is None:
            yield text(x + LABEL, y + LINE // 2 + 5, "...", **HEADING)
        else:
            yield text(x, y + LINE // 2 + 4, f"node {node.number}", **PLAIN)
            wide = min(ROW, len(node.ranks)) * CELL + 4
            high = _rows(node) * LINE + 4
            yield rect(x + LABEL - 3, y - 3, wide, high, rx=5, fill="none", stroke="#888")
            for index, rank in enumerate(node.ranks):
                row, column = divmod(index, ROW)
                yield _cell(panel, degrees, rank, (x + LABEL + column * CELL, y + row * LINE))
        y += _rows(node) * LINE + GAP


def _cell(panel: _Panel, degrees: Degrees, rank: int, corner: tuple[int, int]) -> str:
    (x, y), coordinates = corner, degrees.coordinates(rank)
    number = _group(degrees, panel.axes, rank) if panel.axes else None
    colour = "white" if number is None else COLOURS[number % len(COLOURS)]
    below = ".".join(str(coordinates[axis]) for axis in _shown(degrees)) if number is None else f"group {number}"
    middle = x + (CELL - 2) // 2
    body = (
        title(f"rank {rank}: " + ", ".join(f"{axis} {coordinates[axis]}" for axis in DENSE)),
        rect(x, y, CELL - 2, LINE - 2, rx=3, fill=colour, stroke="#555"),
        text(middle, y + 15, str(rank), **STRONG, text_anchor="middle"),
        text(middle, y + 27, below, **SMALL),
    )
    return group(body, data_rank=rank, data_group=below)
