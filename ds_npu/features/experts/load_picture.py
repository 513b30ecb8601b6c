"""Tokens by expert and step as a picture: for each layer a map, a row for each expert, a column for each interval."""

from __future__ import annotations

import base64
import itertools
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ds_npu.svg import drawing, element, rect, text

MOST_COLUMNS = 256
"""The most columns of a map; beyond that, neighbours are merged."""
MOST_TIMES = 4.0
"""The load, relative to the mean, that has the last colour."""
COLUMNS, WIDTH, LABEL, TITLE, GAP, MARGIN = 2, 480, 34, 22, 34, 24
"""Maps in a row; pixels: of a map, left of it, above it, between maps, around all."""
LEAST_HEIGHT, ROW_HEIGHT = 48, 6
BLUE, WHITE, RED, DARK = (33, 102, 172), (247, 247, 247), (214, 69, 60), (90, 0, 20)
"""No token, the mean, half and all of MOST_TIMES."""


@dataclass
class LoadHistory:
    """Counts of intervals; pairs of intervals are merged where there are many."""

    steps: list[int] = field(default_factory=list)
    """The last step of each interval."""
    layers: dict[str, list[list[int]]] = field(default_factory=dict)
    """The tokens of each expert in each interval, by layer."""

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
    heading = "Tokens of each expert, relative to the mean of its layer"
    lines = [text(MARGIN, MARGIN, heading, font_size=15, font_weight="bold"), *_legend(MARGIN, MARGIN + 10)]
    for number, (name, columns) in enumerate(history.layers.items()):
        row, column = divmod(number, COLUMNS)
        corner = (MARGIN + column * (LABEL + WIDTH + GAP), 3 * MARGIN + TITLE + row * (TITLE + height + GAP))
        lines += _map(name, columns, history.steps, corner)
    return drawing(*whole, lines)


def _height(experts: int) -> int:
    return max(LEAST_HEIGHT, ROW_HEIGHT * min(experts, 64))


def _map(name: str, columns: list[list[int]], steps: list[int], corner: tuple[int, int]) -> Iterator[str]:
    x, y = corner
    experts = len(columns[0])
    height = _height(len(columns[0]))
    whole = [sum(each) for each in zip(*columns, strict=True)]
    title, small = {"font_size": "12"}, {"font_size": "10", "fill": "#444444"}
    worst = max(whole) * experts / max(1, sum(whole))
    yield text(x + LABEL, y - 6, f"{name}: the most loaded expert has {worst:.2f} x the mean of all steps", **title)
    cells = [[_palette_index(column, expert) for column in columns] for expert in range(experts)]
    # Cells of several pixels: viewers blur what they enlarge.
    wide = -(-WIDTH // len(columns))
    high = -(-height // experts)
    pixels = [[cell for cell in row for _ in range(wide)] for row in cells for _ in range(high)]
    yield _image((x + LABEL, y), (WIDTH, height), pixels, style="image-rendering:pixelated")
    yield rect(x + LABEL, y, WIDTH, height, fill="none", stroke="#888888")
    yield text(x + LABEL - 4, y + 9, "0", **small, text_anchor="end")
    yield text(x + LABEL - 4, y + height, f"{experts - 1}", **small, text_anchor="end")
    yield text(x + LABEL, y + height + 13, f"step {steps[0]}", **small)
    yield text(x + LABEL + WIDTH, y + height + 13, f"step {steps[-1]}", **small, text_anchor="end")


def _palette_index(column: Sequence[int], expert: int) -> int:
    times = column[expert] * len(column) / max(1, sum(column))
    return round(255 * min(times, MOST_TIMES) / MOST_TIMES)


def _legend(x: int, y: int) -> Iterator[str]:
    yield _image((x, y), (256, 12), [range(256)] * 12)
    for times in range(int(MOST_TIMES) + 1):
        words = f"{times}" + (" or more" if times == MOST_TIMES else "")
        yield text(x + round(256 * times / MOST_TIMES), y + 24, words, font_size=10, text_anchor="middle")


def _image(corner: tuple[int, int], size: tuple[int, int], pixels: Sequence[Sequence[int]], **style: str) -> str:
    """``pixels``, indices into the palette, stretched to ``size``."""
    box = {"x": corner[0], "y": corner[1], "width": size[0], "height": size[1]}
    href = f"data:image/png;base64,{base64.b64encode(_png(pixels)).decode()}"
    return element("image", **box, preserveAspectRatio="none", **style, href=href)


def _palette() -> bytes:
    """The 256 colours: from BLUE over WHITE, at the mean, and RED to DARK."""
    mean = round(255 / MOST_TIMES)
    stops = [(0, BLUE), (mean, WHITE), (2 * mean, RED), (255, DARK)]
    colours = []
    for index in range(256):
        (low, first), (high, last) = next(pair for pair in itertools.pairwise(stops) if index <= pair[1][0])
        part = (index - low) / (high - low)
        colours += [round(a + part * (b - a)) for a, b in zip(first, last, strict=True)]
    return bytes(colours)


def _png(rows: Sequence[Sequence[int]]) -> bytes:
    """A PNG file of one pixel for each number, an index into the palette (W3C PNG, colour type 3)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows), 9)
    parts = ((b"IHDR", header), (b"PLTE", _palette()), (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in parts)
