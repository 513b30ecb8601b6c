"""The section as a JSON schema, in words, and as a table: all from the fields of ``DsNpuConfig``."""

from __future__ import annotations

import functools
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from ds_npu.config.sections import DsNpuConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"
LONGEST_CELL = 160
BOUNDS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
    "multipleOf": "a multiple of",
}


def file_schema() -> dict[str, Any]:
    """The JSON schema of a ds_config.json, for editors: DeepSpeed's own keys are left open."""
    return {"$schema": DIALECT, "type": "object", "properties": {"ds_npu": section_schema()}}


@functools.cache
def section_schema() -> dict[str, Any]:
    """The JSON schema of the section alone, complete in itself (no ``$ref``)."""
    schema = DsNpuConfig.model_json_schema()
    inlined: dict[str, Any] = _inlined(schema, schema.pop("$defs"))
    return inlined


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """``node`` with every reference replaced by what it names, and without pydantic's titles."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        # The reference's own default is dropped: it only repeats those of the section's keys.
        node = definitions[node["$ref"].removeprefix("#/$defs/")]
    return {key: _inlined(value, definitions) for key, value in node.items() if key != "title"}


def leaves(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The keys that hold a value, also in nested sections, as (path within the section, schema)."""
    for key, node in schema["properties"].items():
        if "properties" in node:
            yield from leaves(node, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", node


def accepted(node: dict[str, Any]) -> str:
    """The values that a schema accepts, in words: ``an integer >= 1``."""
    if "anyOf" in node:
        return " or ".join(accepted(option) for option in node["anyOf"])
    if "enum" in node:
        return "one of " + ", ".join(repr(value) for value in node["enum"])
    if "const" in node:
        return repr(node["const"])
    if "properties" in node:
        return "an object with some of the keys " + ", ".join(node["properties"])
    return _accepted_of_type(node)


def _accepted_of_type(node: dict[str, Any]) -> str:
    kind = node.get("type", "anything")
    if kind in ("integer", "number"):
        article = "an" if kind == "integer" else "a"
        bounds = " and ".join(f"{sign} {node[key]}" for key, sign in BOUNDS.items() if key in node)
        return " ".join([article, kind, *([bounds] if bounds else [])])
    if kind == "array" and not node["items"]:
        return "a list"
    if kind == "object" and "additionalProperties" not in node:
        return "an object"
    if kind == "array":
        return f"a list, each item {accepted(node['items'])}"
    if kind == "object":
        return f"an object, each value {accepted(node['additionalProperties'])}"
    words = {"boolean": "true or false", "null": "null", "anything": "anything"}
    return words.get(kind) or str(node.get("description", "a string"))


def reference() -> str:
    """The section's keys as a Markdown table, for docs/keys.md."""
    rows = ["| key | accepts | default | meaning |", "|---|---|---|---|"]
    for path, node in leaves(section_schema()):
        values = textwrap.shorten(accepted(node), LONGEST_CELL, placeholder=" ...")
        rows.append(f"| `{path}` | {values} | `{json.dumps(node['default'])}` | {node['description']} |")
    return "\n".join(rows) + "\n"
