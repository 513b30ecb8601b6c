"""The picture of the load of experts: its maps read back from the file."""

from __future__ import annotations

import base64
import struct
import zlib
from xml.etree import ElementTree

import pytest

from ds_npu.features.experts.load_picture import MOST_COLUMNS, LoadHistory, load_svg

SVG = "{http://www.w3.org/2000/svg}"


def maps_of(svg: str) -> list[list[list[tuple[int, int, int]]]]:
    """Of each layer the colours of its map, a row for each expert; each cell's first pixel."""
    found = []
    for image in ElementTree.fromstring(svg).iter(f"{SVG}image"):
        data = base64.b64decode(image.get("href").partition(",")[2])
        chunks, at = {}, 8
        while at < len(data):
            (size,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
            chunks[kind] = data[at + 8 : at + 8 + size]
            assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + chunks[kind])
            at += 12 + size
        width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
        assert rest == [8, 3, 0, 0, 0]
        raw = zlib.decompress(chunks[b"IDAT"])
        colours = [chunks[b"PLTE"][3 * each : 3 * each + 3] for each in range(256)]
        rows = [raw[row * (width + 1) + 1 : (row + 1) * (width + 1)] for row in range(height)]
        found.append([[tuple(colours[each]) for each in row] for row in rows])
    return found


def test_colours_are_the_loads():
    history = LoadHistory()
    history.add(10, {"model.layers.0.mlp": [8, 0, 4, 4], "<second>": [1, 1]})
    history.add(20, {"model.layers.0.mlp": [16, 0, 0, 0], "<second>": [2, 2]})
    svg = load_svg(history)
    legend, first, second = maps_of(svg)
    at_mean = legend[0][64]
    assert min(at_mean) > 240 and legend[0][0] == (33, 102, 172) and legend[0][255] == (90, 0, 20)
    high, wide = len(first) // 4, len(first[0]) // 2
    cells = [[first[row * high][column * wide] for column in range(2)] for row in range(4)]
    assert cells[1] == [legend[0][0]] * 2
    assert cells[0] == [legend[0][128], legend[0][255]]
    assert cells[2] == cells[3] == [at_mean, legend[0][0]]
    assert {each for row in second for each in row} == {at_mean}
    texts = [each.text for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert "model.layers.0.mlp: the most loaded expert has 3.00 x the mean of all steps" in texts
    assert {"step 10", "step 20", "<second>: the most loaded expert has 1.00 x the mean of all steps"} <= set(texts)


def test_a_long_history_keeps_all_tokens():
    history, steps = LoadHistory(), 5 * MOST_COLUMNS + 3
    for step in range(1, steps + 1):
        history.add(step, {"layer": [step, 1]})
    columns = history.layers["layer"]
    assert len(columns) == len(history.steps) <= MOST_COLUMNS
    assert [sum(each) for each in zip(*columns, strict=True)] == [steps * (steps + 1) // 2, steps]
    assert history.steps[-1] == steps and history.steps == sorted(history.steps)
    # Each column ends with its step.
    assert [sum(each[1] for each in columns[: place + 1]) for place in range(len(columns))] == history.steps


@pytest.mark.parametrize("experts", [1, 3, 256])
def test_every_number_of_experts_is_drawn(experts):
    history = LoadHistory()
    history.add(1, {"layer": [0] * experts})
    _, drawn = maps_of(load_svg(history))
    assert len(drawn) >= experts
