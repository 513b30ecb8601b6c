"""The profiles of machines: each rule of their file is shown something that breaks it; seconds of operators by hand."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest

from ds_npu.topology.machine import (
    A2,
    FILE,
    LIKE,
    MACHINES,
    TABLES,
    UNITS,
    Machine,
    entries_of,
    interpolated,
    machine_from,
    machine_of,
)

PROFILE = json.loads(FILE.read_text())["machines"]


def entries():
    """A2's part of the file, to be broken."""
    return copy.deepcopy(entries_of(PROFILE, "A2"))


def test_the_file_is_what_is_used():
    assert {name: machine_from(name, entries_of(PROFILE, name)) for name in PROFILE} == MACHINES
    assert machine_from("A2", entries()) == A2 == dataclasses.replace(MACHINES["910B2"], name="A2")
    assert [field.name for field in dataclasses.fields(Machine)] == ["name", *UNITS, "evidence"]


def test_chips_have_what_their_cores_and_clocks_give():
    clocks = {"910B1": (24, 1.85e9), "910B2": (24, 1.8e9), "910B3": (20, 1.8e9), "A3": (24, 1.8e9)}
    for name, (cores, clock) in clocks.items():
        machine = MACHINES[name]
        assert (machine.cores, machine.peak) == (cores, pytest.approx(cores * clock * 8192, rel=1e-3))
        assert machine.matmul == pytest.approx(0.855 * machine.peak, rel=1e-3)


def test_a_part_that_is_like_another_differs_from_it():
    for name, part in PROFILE.items():
        for field, entry in part.items():
            if LIKE in part and field != LIKE:
                assert entry["value"] != entries_of(PROFILE, part[LIKE])[field]["value"], (name, field)


def test_an_npu_is_known_by_its_name():
    names = ("Ascend910B1", "Ascend910B2", "Ascend910B3", "Ascend910_9391", "Ascend910B2C", "Ascend910B4", "cpu")
    assert [machine_of(name).name for name in names] == ["910B1", "910B2", "910B3", "A3", "A2", "A2", "A2"]


@pytest.mark.parametrize("field", UNITS)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source": ""}, "without a source"),
        ({"source": " \n"}, "without a source"),
        ({"source": None}, "without a source"),
        ({"unit": "GB/s"}, "the unit is 'GB/s', not"),
        ({"value": 0}, "no positive number|no table"),
        ({"value": -1.0}, "no positive number|no table"),
        ({"value": float("inf")}, "no positive number|no table"),
        ({"value": True}, "no positive number|no table"),
        ({"value": "8"}, "no positive number|no table"),
        ({"mark": "guessed"}, "the mark is 'guessed', not"),
        ({"trust": "full"}, "the trust is 'full', not"),
        ({"remark": "guessed"}, "not exactly a value, a unit, a mark, a trust and a source"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_wrong_entry_is_refused_with_its_place(field, change, said):
    broken = entries()
    broken[field] |= change
    with pytest.raises(ValueError, match=rf"machines\.json: A2\.{field}: .*({said})"):
        machine_from("A2", broken)


@pytest.mark.parametrize("lacking", ["value", "unit", "mark", "trust", "source"])
def test_an_entry_has_all_of_its_parts(lacking):
    broken = entries()
    del broken["network"][lacking]
    with pytest.raises(ValueError, match=r"A2\.network: has not exactly a value, a unit, a mark"):
        machine_from("A2", broken)
    with pytest.raises(ValueError, match=r"A2\.network: has not exactly"):
        machine_from("A2", entries() | {"network": 22.5e9})


def test_a_machine_has_all_numbers_and_no_others():
    with pytest.raises(ValueError, match=r"A2: missing or unknown: core, port$"):
        machine_from("A2", {key: entry for key, entry in entries().items() if key != "port"} | {"core": {}})


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "no table"),
        ({"16384": 1e14, "8192": 1e14}, "do not ascend"),
        ({"8192": 1e14, "08192": 1e14}, "do not ascend"),
        ({"8192": 0}, "no positive number"),
    ],
    ids=str,
)
def test_a_table_has_ascending_sizes_and_positive_numbers(table, said):
    for field in TABLES:
        broken = entries()
        broken[field]["value"] = table
        with pytest.raises(ValueError, match=rf"A2\.{field}: .*{said}"):
            machine_from("A2", broken)


def test_between_two_sizes_a_rate_is_linear_in_their_logarithm():
    rates = [interpolated(((1024, 1e14), (4096, 3e14)), size) for size in (1, 1024, 2048, 4096, 1 << 20)]
    assert rates == pytest.approx([1e14, 1e14, 2e14, 3e14, 3e14], rel=1e-12)


def test_a_product_takes_whole_tiles_on_every_core():
    machine = dataclasses.replace(A2, cores=4, matmul=1e12, matmul_float32=1e11)
    tile = 2 * 128 * 256 * 10 / 1e12
    # 4 tiles of 128 x 256 are a round of the cores, the 5th a second one; 1 row takes as long as 128.
    assert machine.product_seconds(512, 256, 10, 2) == pytest.approx(4 * tile)
    assert machine.product_seconds(513, 256, 10, 2) == pytest.approx(8 * tile)
    assert machine.product_seconds(1, 256, 10, 2) == pytest.approx(4 * tile)
    # The other way round 256 x 512 needs 4 tiles as well, 257 x 128 two and not three.
    assert machine.product_seconds(256, 512, 10, 2) == pytest.approx(4 * tile)
    assert machine.product_seconds(257, 128, 10, 2, count=4) == pytest.approx(8 * tile)
    assert machine.product_seconds(512, 256, 10, 4) == pytest.approx(40 * tile)


def test_measured_products_are_met():
    """Source: hardware.md, section 4; less the 15 us of which a part is the host's."""
    measured = {(6144, 6144, 6144): 308e12, (2048, 4096, 4000): 257e12, (14336, 4096, 4096): 317.3e12}
    for (rows, columns, inner), rate in measured.items():
        seconds = MACHINES["910B2"].product_seconds(rows, columns, inner, 2) + 15e-6
        assert seconds == pytest.approx(2 * rows * columns * inner / rate, rel=0.067)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        # 2 nodes of 4: 3/4 of 8e9 bytes over 3 links, half over the network; a step between two nodes.
        ("all_gather", 6e9 / 3e9 + 4e9 / 2e9 + 0.25),
        ("reduce_scatter", 6e9 / 3e9 + 4e9 / 2e9 + 0.25),
        # Scattered and gathered within nodes; half of a rank's quarter twice between them.
        ("all_reduce", 2 * 6e9 / 3e9 + 2 * (1e9 / 2e9 + 0.25)),
        # 3 of 8 parts to the node while 4 of 8 go to the other one.
        ("all_to_all", max(3e9 / 3e9, 4e9 / 2e9) + 0.25),
        ("barrier", 0.0),
    ],
)
def test_a_collective_takes_its_phases(kind, seconds):
    machine = dataclasses.replace(A2, message=0.125, port=1e10, link=1e9, network=2e9, hop=0.25)
    assert machine.collective_seconds(kind, 8e9, near=4, nodes=2) == pytest.approx(0.125 + seconds)


def test_a_port_is_no_faster_with_more_peers():
    machine = dataclasses.replace(A2, message=0.0, port=2.5e9, link=1e9)
    assert machine.collective_seconds("all_gather", 8e9, near=8, nodes=1) == pytest.approx(7e9 / 2.5e9)


def test_measured_collectives_of_one_server_are_met():
    """Source: hardware.md, section 3: output bytes a second of large collectives; the sizes are not published."""
    n = 1e9
    for ranks, gather, reduce in ((2, 38e9, 18e9), (8, 149e9, 72e9)):
        assert n / A2.collective_seconds("all_gather", n, ranks, 1) == pytest.approx(gather, rel=0.09)
        assert n / A2.collective_seconds("all_reduce", n, ranks, 1) == pytest.approx(reduce, rel=0.09)


def test_an_operator_takes_the_longer_of_its_arithmetic_and_its_bytes():
    machine = dataclasses.replace(A2, memory=((1000, 4e9), (2000, 2e9)), kernel=1e-6)
    assert machine.operator_seconds(0.0, 2000) == pytest.approx(1e-6 + 1e-6)
    assert machine.operator_seconds(0.0, 500) == pytest.approx(1e-6 + 0.125e-6)
    assert machine.operator_seconds(3e-6, 2000) == pytest.approx(4e-6)
    assert machine.attention_seconds(1.15e14, 100) == pytest.approx(1.0)
