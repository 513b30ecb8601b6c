"""A picture of the errors of one step by depth: from left to right the order of execution, upwards the error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ds_npu.comparison.compared_steps import Comparison, Row
from ds_npu.dump_hooks import GRADIENT, GRADIENT_OF_OUTPUT, OUTPUT, STATE, WEIGHT
from ds_npu.svg import Style, drawing, element, text, title

WIDTH, HEIGHT, LEFT, TOP, SIDE, BOTTOM = 860, 360, 70, 60, 220, 60
"""Pixels: width and height of the plot, and the margins around it."""
COLOURS = {
    WEIGHT: "#6c757d",
    OUTPUT: "#2d6a4f",
    GRADIENT_OF_OUTPUT: "#457b9d",
    GRADIENT: "#b392ac",
    STATE: "#f6bd60",
}
LEAST = 1e-18
"""The error at which equal tensors are drawn."""


def error_svg(comparison: Comparison, names: tuple[str, str]) -> str:
    """An SVG file of the step of the first finding, or of the first step; ``names`` of both runs."""
    first = comparison.first_off()
    steps = sorted({row.step for row in comparison.rows})
    step = steps[0] if first is None else first.step
    rows = [row for row in comparison.rows if row.step == step]
    values = [max(each, LEAST) for row in rows for each in (row.error, row.explained) if math.isfinite(each)]
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)) + 1e-9)
    lines = [
        _text(LEFT, 24, f"Error by depth in step {step}: A {names[0]}, B {names[1]}", font_size=15, font_weight="bold"),
        _text(LEFT, 42, "points: error of B to A; line: the error that rounding explains"),
        *_grid(low, max(high, low + 1)),
        *_marks(rows, low, max(high, low + 1), first),
    ]
    for index, (kind, colour) in enumerate(COLOURS.items()):
        lines.append(element("circle", cx=LEFT + WIDTH + 20, cy=TOP + 10 + 20 * index, r=5, fill=colour))
        lines.append(_text(LEFT + WIDTH + 32, TOP + 14 + 20 * index, f"{kind}s"))
    if first is not None:
        lines.append(_text(LEFT, TOP + HEIGHT + 40, f"first further off: {first}, error {first.error:.1e}"))
    return drawing(LEFT + WIDTH + SIDE, TOP + HEIGHT + BOTTOM, lines, font_size=11)


def _height(value: float, low: int, high: int) -> float:
    digits = high if math.isinf(value) else math.log10(max(value, LEAST))
    return TOP + HEIGHT - (min(max(digits, low), high) - low) / (high - low) * HEIGHT


def _grid(low: int, high: int) -> Iterator[str]:
    for power in range(low, high + 1, max((high - low) // 8, 1)):
        y = _height(10.0**power, low, high)
        yield element("line", x1=LEFT, x2=LEFT + WIDTH, y1=y, y2=y, stroke="#888", stroke_opacity=0.3)
        yield _text(LEFT - 6, y + 4, f"1e{power}", text_anchor="end")
    yield _text(LEFT, TOP + HEIGHT + 20, "order of execution: weights, forward, backward, gradients, optimizer")


def _marks(rows: Sequence[Row], low: int, high: int, first: Row | None) -> Iterator[str]:
    width = WIDTH / max(len(rows), 1)
    points = " ".join(
        f"{LEFT + width * (index + 0.5):.1f},{_height(row.explained, low, high):.1f}" for index, row in enumerate(rows)
    )
    yield element("polyline", points=points, fill="none", stroke="#e63946", stroke_width=1.5)
    for index, row in enumerate(rows):
        x = LEFT + width * (index + 0.5)
        y = _height(row.error, low, high)
        tooltip = title(f"{row}: error {row.error:.1e}, rounding explains {row.explained:.1e}")
        yield element("circle", tooltip, cx=x, cy=y, r=3.5 if row.is_off else 2.5, fill=COLOURS[row.kind])
        if row == first:
            yield element("circle", cx=x, cy=y, r=8, fill="none", stroke="#e63946", stroke_width=2)


def _text(x: float, y: float, words: str, **style: Style) -> str:
    return text(float(x), float(y), words, fill="#222", **style)
