"""Tokens by expert and step as a picture: for each layer a map, a row for each expert, a column for each interval."""

from __future__ import annotations

import base64
import itertools
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

MOST_COLUMNS = 256
"""Of more, neighbours become one."""
MOST_TIMES = 4.0
"""The load, relative to the mean, that has the last colour."""
COLUMNS, WIDTH, LABEL, TITLE, GAP, MARGIN = 2, 480, 34, 22, 34, 24
"""Maps in a row; pixels: of a map, left of it, above it, between maps, around all."""
LEAST_HEIGHT, ROW_HEIGHT = 48, 6
BLUE, WHITE, RED, DARK = (33, 102, 172), (247, 247, 247), (214, 69, 60), (90, 0, 20)
"""No token, the mean, half and all of MOST_TIMES."""


@dataclass
class LoadHistory:
    """Counts of intervals, of which the oldest become longer where there are many."""

    steps: list[int] = field(default_factory=list)
    """The last step of each interval."""
    layers: dict[str, list[list[int]]] = field(default_factory=dict)
    """By layer, for each interval, the tokens of each expert."""

    def add(self, step: int, chosen: Mapping[str, Sequence[int]]) -> None:
        """Add the interval that ends with ``step``: by layer the tokens of each expert."""
        self.steps.append(step)
        for name, each in chosen.items():
            self.layers.setdefault(name, []).append(list(each))
        if len(self.steps) > MOST_COLUMNS:
            self.steps = self.steps[1::2] + self.steps[len(self.steps) // 2 * 2 :]
            for name, columns in self.layers.items():
                pairs = [columns[start : start + 2] for start in range(0, len(columns), 2)]
                self.layers[name] = [[sum(each) for each in zip(*pair, strict=True)] for pair in pairs]


def load_svg(history: LoadHistory) -> str:
    """An SVG file of ``history``: the load of each expert relative to the mean of its layer, white at 1."""
    height = max((_height(len(columns[0])) for columns in history.layers.values()), default=0)
    rows = -(-len(history.layers) // COLUMNS)
    whole = (
        2 * MARGIN + min(COLUMNS, max(1, len(history.layers))) * (LABEL + WIDTH + GAP),
        3 * MARGIN + TITLE + rows * (TITLE + height + GAP),
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole[0]}" height="{whole[1]}" '
        f'viewBox="0 0 {whole[0]} {whole[1]}" font-family="sans-serif">',
        f'<rect width="{whole[0]}" height="{whole[1]}" fill="white"/>',
        _text(
            MARGIN,
            MARGIN,
            "Tokens of each expert, relative to the mean of its layer",
            'font-size="15" font-weight="bold"',
        ),
        *_legend(MARGIN, MARGIN + 10),
    ]
    for number, (name, columns) in enumerate(history.layers.items()):
        row, column = divmod(number, COLUMNS)
        place = (MARGIN + column * (LABEL + WIDTH + GAP), 3 * MARGIN + TITLE + row * (TITLE + height + GAP))
        lines += _map(name, columns, history.steps, place)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _height(experts: int) -> int:
    return max(LEAST_HEIGHT, ROW_HEIGHT * min(experts, 64))


def _map(name: str, columns: list[list[int]], steps: list[int], place: tuple[int, int]) -> Iterator[str]:
    x, y = place
    experts, height = len(columns[0]), _height(len(columns[0]))
    whole = [sum(each) for each in zip(*columns, strict=True)]
    worst = max(whole) * experts / max(1, sum(whole))
    yield _text(
        x + LABEL, y - 6, f"{name}: the most loaded expert has {worst:.2f} x the mean of all steps", 'font-size="12"'
    )
    cells = [[_place_in_palette(column, expert) for column in columns] for expert in range(experts)]
    # Cells of several pixels: viewers blur what they enlarge.
    wide, high = -(-WIDTH // len(columns)), -(-height // experts)
    pixels = [[cell for cell in row for _ in range(wide)] for row in cells for _ in range(high)]
    data = base64.b64encode(_png(pixels)).decode()
    yield (
        f'<image x="{x + LABEL}" y="{y}" width="{WIDTH}" height="{height}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{data}"/>'
    )
    yield f'<rect x="{x + LABEL}" y="{y}" width="{WIDTH}" height="{height}" fill="none" stroke="#888888"/>'
    small = 'font-size="10" fill="#444444"'
    yield _text(x + LABEL - 4, y + 9, "0", f'{small} text-anchor="end"')
    yield _text(x + LABEL - 4, y + height, f"{experts - 1}", f'{small} text-anchor="end"')
    yield _text(x + LABEL, y + height + 13, f"step {steps[0]}", small)
    yield _text(x + LABEL + WIDTH, y + height + 13, f"step {steps[-1]}", f'{small} text-anchor="end"')


def _place_in_palette(column: Sequence[int], expert: int) -> int:
    times = column[expert] * len(column) / max(1, sum(column))
    return round(255 * min(times, MOST_TIMES) / MOST_TIMES)


def _legend(x: int, y: int) -> Iterator[str]:
    strip = base64.b64encode(_png([range(256)] * 12)).decode()
    yield (
        f'<image x="{x}" y="{y}" width="256" height="12" preserveAspectRatio="none" '
        f'href="data:image/png;base64,{strip}"/>'
    )
    for times in range(int(MOST_TIMES) + 1):
        said = f"{times}" + (" or more" if times == MOST_TIMES else "")
        yield _text(x + round(256 * times / MOST_TIMES), y + 24, said, 'font-size="10" text-anchor="middle"')


def _text(x: float, y: float, said: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" {style}>{escape(said)}</text>'


def _palette() -> bytes:
    """256 colours: from BLUE over WHITE, at the mean, and RED to DARK."""
    mean = round(255 / MOST_TIMES)
    stops = [(0, BLUE), (mean, WHITE), (2 * mean, RED), (255, DARK)]
    colours = []
    for place in range(256):
        (low, first), (high, last) = next(pair for pair in itertools.pairwise(stops) if place <= pair[1][0])
        part = (place - low) / (high - low)
        colours += [round(a + part * (b - a)) for a, b in zip(first, last, strict=True)]
    return bytes(colours)


def _png(rows: Sequence[Sequence[int]]) -> bytes:
    """A PNG file of one pixel for each number, a place in the palette (W3C PNG, colour type 3)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows), 9)
    parts = ((b"IHDR", header), (b"PLTE", _palette()), (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in parts)
