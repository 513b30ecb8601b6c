"""A picture of the uses of a rank's memory in one step: time from left to right, uses stacked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_npu.memory.memory_use import (
    BACKWARD,
    BETWEEN,
    GRADIENTS,
    OPTIMIZER,
    OTHER_ACTIVATIONS,
    REST,
    UNITS,
    WEIGHTS,
    Bytes,
    MemoryUse,
    largest_activations,
)
from ds_npu.svg import Style, drawing, element, rect, text, title

WIDTH, HEIGHT, LEFT, TOP, SIDE, BOTTOM = 760, 360, 70, 50, 400, 50
"""Pixels of the plot, and around it."""
COLOURS = {
    WEIGHTS: "#457b9d",
    OPTIMIZER: "#8ecae6",
    GRADIENTS: "#b392ac",
    BACKWARD: "#f6bd60",
    BETWEEN: "#ced4da",
    REST: "#6c757d",
}
GREENS = ("#1b4332", "#2d6a4f", "#40916c", "#52b788", "#74c69d", "#95d5b2", "#b7e4c7")
"""The colours of activations: the module with the most bytes first, all other modules last."""
TICKS = 4


def use_svg(step: int, use: MemoryUse) -> str:
    """An SVG file."""
    bands, colours = _bands(use)
    most = max([use.peak, *(sum(held.values()) for _, held in use.curve)], default=1) or 1
    count = max([count for count, _ in use.curve], default=0) or 1
    size, unit = next((each for each in UNITS if most >= each[0]), UNITS[-1])
    lines = [
        _text(LEFT, 24, f"Memory of rank {use.rank} in step {step}", font_size=15, font_weight="bold"),
        *_areas(use.curve, bands, colours, (WIDTH / count, HEIGHT / most)),
    ]
    for tick in range(TICKS + 1):
        y = TOP + HEIGHT - tick * HEIGHT / TICKS
        lines.append(element("line", x1=LEFT, x2=LEFT + WIDTH, y1=y, y2=y, stroke="#888", stroke_opacity=0.3))
        lines.append(_text(LEFT - 6, y + 4, f"{tick * most / TICKS / size:,.1f} {unit}", text_anchor="end"))
    lines.append(_text(LEFT, TOP + HEIGHT + 18, "begin of the step"))
    words = f"its end, after {count:,} allocations and releases, each of the same width"
    lines.append(_text(LEFT + WIDTH, TOP + HEIGHT + 18, words, text_anchor="end"))
    lines += _legend(use, bands, colours, (size, unit))
    return drawing(LEFT + WIDTH + SIDE, TOP + HEIGHT + BOTTOM, lines, font_size=11)


def _bands(use: MemoryUse) -> tuple[list[str], dict[str, str]]:
    """The names of the bands, from below, and their colours."""
    modules = largest_activations([use], len(GREENS) - 1)
    colours = {name: COLOURS[name] for name in (WEIGHTS, OPTIMIZER, GRADIENTS)}
    colours |= dict(zip(modules, GREENS, strict=False)) | {OTHER_ACTIVATIONS: GREENS[-1]}
    colours |= {name: COLOURS[name] for name in (BACKWARD, BETWEEN, REST)}
    there = {_band(name, colours) for _, held in [*use.curve, (0, use.at_peak)] for name in held}
    return [name for name in colours if name in there], colours


def _band(name: str, colours: dict[str, str]) -> str:
    return name if name in colours else OTHER_ACTIVATIONS


def _in_bands(held: Bytes, bands: Sequence[str], colours: dict[str, str]) -> list[int]:
    values = dict.fromkeys(bands, 0)
    for name, value in held.items():
        values[_band(name, colours)] += value
    return list(values.values())


def _areas(
    curve: Sequence[tuple[int, Bytes]], bands: Sequence[str], colours: dict[str, str], scale: tuple[float, float]
) -> Iterator[str]:
    """A polygon for each band; ``scale``: pixels per change of the memory, and per byte."""
    xs = [LEFT + scale[0] * count for count, _ in curve]
    rows = [_in_bands(held, bands, colours) for _, held in curve]
    below = [0.0] * len(rows)
    for number, band in enumerate(bands):
        above = [low + row[number] for low, row in zip(below, rows, strict=True)]
        edge = [*zip(xs, above, strict=True), *reversed(list(zip(xs, below, strict=True)))]
        points = " ".join(f"{x:.1f},{TOP + HEIGHT - scale[1] * value:.1f}" for x, value in edge)
        yield element("polygon", title(band), points=points, fill=colours[band])
        below = above


def _legend(use: MemoryUse, bands: Sequence[str], colours: dict[str, str], unit: tuple[int, str]) -> Iterator[str]:
    x = LEFT + WIDTH + 16
    values = dict(zip(bands, _in_bands(use.at_peak, bands, colours), strict=True))
    yield _text(x, TOP - 6, f"at the peak: {use.peak / unit[0]:,.2f} {unit[1]}", font_weight="bold")
    for row, (band, value) in enumerate(reversed(values.items())):
        y = TOP + 8 + 18 * row
        yield rect(x, y, 12, 12, fill=colours[band])
        yield _text(x + 18, y + 10, f"{value / unit[0]:,.2f} {unit[1]}  {band}")


def _text(x: float, y: float, words: str, **style: Style) -> str:
    return text(float(x), float(y), words, fill="#222", **style)
