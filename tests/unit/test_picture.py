"""The picture of the layout: every rank stands in its node, and has the colour of its group."""

from __future__ import annotations

import itertools
import json
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict

import pytest

from ds_npu.cli.layout import nodes_of_a_group
from ds_npu.cli.main import main
from ds_npu.cli.picture import MOST_ROWS, ROW, layout_svg
from ds_npu.topology.degrees import AXES, Degrees
from ds_npu.topology.machine import A2, A3

SVG = "{http://www.w3.org/2000/svg}"


def drawn(degrees, stage=1, machine=A2):
    """By panel (its axes), the ranks as (rank, what stands below its number, colour, x, y)."""
    root = ElementTree.fromstring(layout_svg(degrees, stage, machine))
    width, height = float(root.get("width")), float(root.get("height"))
    found = {}
    for panel in root.iter(f"{SVG}g"):
        if "data-panel" not in panel.attrib:
            continue
        ranks = []
        for cell in panel.iter(f"{SVG}g"):
            if "data-rank" in cell.attrib:
                box = cell.find(f"{SVG}rect")
                x, y = float(box.get("x")), float(box.get("y"))
                assert 0 <= x <= width - float(box.get("width")) and 0 <= y <= height - float(box.get("height"))
                ranks.append((int(cell.get("data-rank")), cell.get("data-group"), box.get("fill"), x, y))
        found[tuple(panel.get("data-panel").split())] = ranks
    return found, "".join(root.itertext())


@pytest.mark.parametrize(
    "degrees",
    [Degrees(), Degrees(dp=5), Degrees(tp=2, cp=2, dp=2, pp=2), Degrees(tp=4, cp=3, dp=2), Degrees(dp=4, tp=2, ep=4)],
)
def test_ranks_of_a_group_share_a_colour_and_a_number(degrees):
    found, _ = drawn(degrees)
    wanted = {(axis,) for axis in ("pp", "dp", "cp", "tp") if degrees.size(axis) > 1}
    wanted |= {("dp", "cp")} if degrees.dp > 1 and degrees.cp > 1 else set()
    wanted |= {("ep",), ("edp",)} if degrees.ep > 1 else set()
    assert found.keys() == {(), *wanted}
    for axes in wanted:
        groups, colours = defaultdict(list), defaultdict(set)
        for rank, number, colour, *_ in found[axes]:
            groups[number].append(rank)
            colours[number].add(colour)
        assert sorted(groups.values()) == sorted(degrees.groups(*axes)), axes
        assert all(len(each) == 1 for each in colours.values())
        # Groups that are near each other can be told apart.
        if 1 < len(colours) <= 12:
            assert len(set().union(*colours.values())) == len(colours)


def test_the_place_of_each_rank():
    degrees = Degrees(pp=2, dp=2, cp=2, tp=2)
    found, _ = drawn(degrees)
    for rank, below, *_ in found[()]:
        bits = f"{rank:04b}"
        assert below == ".".join(bits)


@pytest.mark.parametrize("machine", [A2, A3])
def test_ranks_stand_in_nodes_and_no_two_at_one_place(machine):
    found, said = drawn(Degrees(dp=20, tp=2), machine=machine)
    for ranks in found.values():
        assert [rank for rank, *_ in ranks] == list(range(40))
        assert len({(x, y) for *_, x, y in ranks}) == 40
    assert said.count(f"node {39 // machine.node}") == len(found)


def test_titles_say_how_many_groups_and_over_how_many_nodes():
    _, said = drawn(Degrees(dp=4, cp=2, tp=2), stage=3)
    for title in (
        "tensor (tp): 8 groups of 2, each within a node",
        "data (dp): 4 groups of 4, each over 2 nodes",
        "data * context (dp * cp): 2 groups of 8, each over 2 nodes",
        "ZeRO 3 shards weights, gradients and optimizer states",
        "16 ranks on 2 nodes of A2, 8 ranks a node",
    ):
        assert title in said


@pytest.mark.parametrize("node", [8, 16, 3])
def test_groups_touch_as_many_nodes_as_counted_one_by_one(node):
    grids = itertools.product((1, 2, 3), (1, 2, 5), (1, 2), (1, 2, 4))
    for degrees in (Degrees(pp=pp, dp=dp, cp=cp, tp=tp, ep=tp) for pp, dp, cp, tp in grids):
        for axis in (each for each in AXES if degrees.size(each) > 1):
            expected = max(len({rank // node for rank in group}) for group in degrees.groups(axis))
            assert nodes_of_a_group(degrees, axis, node) == expected, (degrees, axis)


def test_a_large_world_is_drawn_in_part_and_at_once():
    start = time.monotonic()
    for machine, nodes in ((A2, "16,384"), (A3, "171")):
        found, said = drawn(Degrees(pp=16, dp=256, cp=4, tp=8), machine=machine)
        assert {len(ranks) for ranks in found.values()} == {MOST_ROWS * ROW}
        assert all(ranks[0][0] == 0 and ranks[-1][0] == 131071 for ranks in found.values())
        assert f"131,072 ranks on {nodes} nodes" in said and "those in the middle are left out" in said
    assert time.monotonic() - start < 5


def test_the_command(tmp_path, capsys):
    config, picture = tmp_path / "ds_config.json", tmp_path / "layout.svg"
    config.write_text(json.dumps({"train_batch_size": 8, "ds_npu": {"parallel": {"tensor": 2}}}))
    assert main(["check", str(config), "--svg", str(picture)]) == 2
    assert "--world-size N" in capsys.readouterr().err and not picture.exists()
    assert main(["check", str(config), "--world-size", "16", "--machine", "A3", "--svg", str(picture)]) == 0
    assert f"The layout is drawn in {picture}" in capsys.readouterr().out
    assert picture.read_text() == layout_svg(Degrees(dp=8, tp=2), 0, A3)
