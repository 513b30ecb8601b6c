"""The JSON schema says what the model says. A small evaluator stands in for the jsonschema package."""

from __future__ import annotations

import json
import re

import pytest
from pydantic import ValidationError

from ds_npu.config.schema import DIALECT, accepted, file_schema, leaves, reference, section_schema
from ds_npu.config.sections import DsNpuConfig

TYPES = {"integer": int, "number": (int, float), "string": str, "boolean": bool, "array": list, "object": dict}
KEYWORDS = {
    "type",
    "anyOf",
    "enum",
    "const",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "multipleOf",
    "minLength",
    "pattern",
    "items",
    "properties",
    "additionalProperties",
    "propertyNames",
    "default",
    "description",
}


def accepts(schema, value):
    """Whether a draft 2020-12 validator would accept ``value``, for the keywords that the schema uses."""
    assert set(schema) <= KEYWORDS, set(schema) - KEYWORDS
    if "anyOf" in schema:
        return any(accepts(option, value) for option in schema["anyOf"])
    kind = schema.get("type")
    if kind == "null":
        return value is None
    if kind and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    checks = {
        "enum": lambda allowed: value in allowed,
        "const": lambda only: value == only,
        "minimum": lambda bound: value >= bound,
        "maximum": lambda bound: value <= bound,
        "exclusiveMinimum": lambda bound: value > bound,
        "multipleOf": lambda factor: value % factor == 0,
        "minLength": lambda length: len(value) >= length,
        "pattern": lambda pattern: re.search(pattern, value) is not None,
        "items": lambda item: all(accepts(item, one) for one in value),
    }
    return all(check(schema[key]) for key, check in checks.items() if key in schema) and accepts_members(schema, value)


def accepts_members(schema, value):
    if not isinstance(value, dict):
        return True
    rest = schema.get("additionalProperties", True)
    for key, member in value.items():
        node = schema.get("properties", {}).get(key, rest)
        if node is False or (node is not True and not accepts(node, member)):
            return False
        if not accepts(schema.get("propertyNames", {}), key):
            return False
    return True


VALUES = [
    None,
    True,
    False,
    0,
    1,
    2,
    -1,
    0.5,
    -0.5,
    "",
    "none",
    "all",
    "full",
    "half",
    "int8",
    "level1",
    "1f1b",
    "my.csv",
    "planned",
]
VALUES += [
    ".csv",
    "auto",
    "hybrid",
    "2",
    [],
    [0],
    [1, 2],
    [-1],
    ["a"],
    [""],
    [True],
    {},
    {"a": "b"},
    {"a": "block"},
    {"": "block"},
    {"a": 1},
    {"": "b"},
]


@pytest.mark.parametrize("path", [path for path, _ in leaves(section_schema())])
def test_schema_and_model_accept_the_same_values(path):
    for value in VALUES:
        section = value
        for key in reversed(path.split(".")):
            section = {key: section}
        try:
            DsNpuConfig.model_validate(section)
        except ValidationError:
            assert not accepts(section_schema(), section), value
        else:
            assert accepts(section_schema(), section), value


@pytest.mark.parametrize("section", [{"parallel": {"tensr": 1}}, {"paralel": {}}, {"parallel": 1}, {"parallel": None}])
def test_schema_is_closed(section):
    assert not accepts(section_schema(), section)


def test_the_schema_of_a_file_leaves_deepspeed_its_keys():
    schema = file_schema()
    assert schema["$schema"] == DIALECT == "https://json-schema.org/draft/2020-12/schema"
    assert "additionalProperties" not in schema and list(schema["properties"]) == ["ds_npu"]
    assert "$ref" not in json.dumps(schema)


def test_a_default_is_accepted_where_it_stands():
    for path, node in leaves(section_schema()):
        assert accepts(node, node["default"]), path


def test_what_is_accepted_is_put_in_words():
    words = {path: accepted(node) for path, node in leaves(section_schema())}
    assert words["parallel.tensor"] == "an integer >= 1 and <= 1048576"
    assert words["pipeline.virtual_stages"] == "an integer >= 1"
    assert words["chunked_loss"] == "true or false or 'planned' or an integer >= 1"
    assert words["tensor_overlap"] == "one of 'none', 'pipelined', 'fused' or null"
    assert words["recompute.layers"] == "one of 'none', 'all' or an integer >= 1"
    assert words["recompute.budget_gib"] == "a number > 0 or null"
    assert words["pipeline.split"] == "a list, each item an integer >= 0"
    assert words["plan"].startswith("an object, each value one of 'block', 'attention', 'query', ")


def test_every_key_is_a_row():
    rows = {row.split("`")[1]: row for row in reference().splitlines()[2:]}
    assert list(rows) == [path for path, _ in leaves(section_schema())]
    assert {row.count("|") for row in rows.values()} == {5}
