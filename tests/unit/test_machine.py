"""The profile of machines: each rule of its file is shown something that breaks it; the rate of attention by keys."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest

from ds_npu.topology.machine import A2, A3, COMMON, FILE, MACHINES, UNITS, Machine, machine_from

PROFILE = json.loads(FILE.read_text())


def entries():
    """A2's part of the file, to be broken."""
    return copy.deepcopy(PROFILE[COMMON] | PROFILE["A2"])


def test_the_file_is_what_is_used():
    assert {name: machine_from(name, PROFILE[COMMON] | PROFILE[name]) for name in MACHINES} == MACHINES
    assert MACHINES.keys() | {COMMON} == PROFILE.keys() and machine_from("A2", entries()) == A2 != A3
    assert [field.name for field in dataclasses.fields(Machine)] == ["name", *UNITS]


def test_every_source_says_what_kind_of_number_it_is():
    sources = [entry["source"] for part in PROFILE.values() for entry in part.values()]
    assert all(source.split(":")[0].split(",")[0] in ("measured", "claimed", "derived") for source in sources)


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
        ({"remark": "guessed"}, "not exactly a value, a unit and a source"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_wrong_entry_is_refused_with_its_place(field, change, said):
    broken = entries()
    broken[field] |= change
    with pytest.raises(ValueError, match=rf"machines\.json: A2\.{field}: .*({said})"):
        machine_from("A2", broken)


@pytest.mark.parametrize("lacking", ["value", "unit", "source"])
def test_an_entry_has_all_of_its_parts(lacking):
    broken = entries()
    del broken["network"][lacking]
    with pytest.raises(ValueError, match=r"A2\.network: has not exactly a value, a unit and a source"):
        machine_from("A2", broken)
    with pytest.raises(ValueError, match=r"A2\.network: has not exactly"):
        machine_from("A2", entries() | {"network": 22.5e9})


def test_a_machine_has_all_numbers_and_no_others():
    with pytest.raises(ValueError, match=r"A2: missing or unknown: cores, port$"):
        machine_from("A2", {key: entry for key, entry in entries().items() if key != "port"} | {"cores": {}})


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
def test_a_table_has_ascending_keys_and_positive_numbers(table, said):
    broken = entries()
    broken["attention"]["value"] = table
    with pytest.raises(ValueError, match=rf"A2\.attention: .*{said}"):
        machine_from("A2", broken)


def test_attention_is_faster_with_more_keys():
    table = dataclasses.replace(A2, attention=((1024, 1e14), (4096, 3e14)))
    rates = [table.attention_rate(keys) for keys in (1, 1024, 2048, 4096, 1 << 20)]
    assert rates == pytest.approx([1e14, 1e14, 2e14, 3e14, 3e14], rel=1e-12)
    assert A2.attention_rate(8192) < A2.attention_rate(16384) < 150e12 < A2.attention_rate(32768)
