"""Checks of DeepSpeed's closed sections, made without DeepSpeed (which imports torch).

``deepspeed_versions`` has a file for each supported version, written from its models by ``python
tests/support/deepspeed_schema.py``; tests compare the installed version's file and its verdicts with DeepSpeed's own.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from ds_npu.config.problems import MOST_PROBLEMS, Problem
from ds_npu.config.reading import near_miss
from ds_npu.config.schema import accepted

FOLDER = Path(__file__).with_name("deepspeed_versions")
Node = dict[str, Any]
Values = dict[str, Any]
Refusals = Iterator[tuple[str, Any, str]]
"""(key, found value, accepted values) of each refusal."""

SCALARS: dict[str, Any] = {
    "integer": int,
    "number": float,
    "boolean": bool,
    "string": str,
    "null": None,
    "object": dict,
}
BOUNDS = {"minimum": "ge", "exclusiveMinimum": "gt", "maximum": "le", "exclusiveMaximum": "lt"}
MOST_NAMES = 12
TORCH_DTYPE = "a torch.dtype, which no file can hold: leave the key out"


@dataclass(frozen=True)
class Schema:
    """The keys that one version of DeepSpeed accepts."""

    version: str
    is_installed: bool
    """Whether this is the installed version; if not, it is the next older known one, or the newest of all."""
    top_level: tuple[str, ...]
    removed: dict[str, str]
    """Top-level keys that older versions had, and what DeepSpeed says of them."""
    removed_from_zero: dict[str, str]
    sections: dict[str, Node]


@dataclass
class Read:
    """A section as DeepSpeed reads it."""

    values: Values = field(default_factory=dict)
    """Right values, with the defaults of keys that are left out; empty where there is no section."""
    problems: list[Problem] = field(default_factory=list)


@functools.cache
def schema() -> Schema:
    """The schema of the installed DeepSpeed."""
    known = {numbers(file.stem): file for file in FOLDER.glob("*.json")}
    try:
        installed = version("deepspeed").split("+")[0]
    except PackageNotFoundError:
        installed = ""
    file = known[max([each for each in known if each <= numbers(installed)] or known)]
    found = json.loads(file.read_text(encoding="utf-8"))
    return Schema(
        file.stem,
        file.stem == installed,
        tuple(found["top_level"]),
        found["removed"],
        found["removed_from_zero"],
        found["sections"],
    )


def numbers(text: str) -> tuple[int, ...]:
    """``0.19.8`` as numbers that can be compared."""
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def read_section(node: Node, raw: Any, path: str) -> Read:
    """The section at ``path`` as DeepSpeed's model reads it."""
    if raw is None and COERCES in node["validators"]:
        raw = {}
    if not isinstance(raw, dict):
        return Read({}, [Problem(path, raw, f"an object with some of the keys {_keys(node)}")])
    read = Read(_defaults(node))
    # "auto" is for the Trainer: DeepSpeed's base model drops it (runtime/config_utils.py).
    given = {key: value for key, value in raw.items() if not is_auto(value)}
    names = _names(node, given)
    for key, value in given.items():
        if key in names:
            read.values[names[key]], wrong = _value(node, names[key], value, f"{path}.{key}")
            read.problems += wrong
        elif schema().is_installed:
            read.problems.append(Problem(f"{path}.{key}", value, _unknown(str(key), node, path, len(read.problems))))
    read.problems += _given_twice(node, names, given, path)
    if not read.problems:
        found = (each for name in node["validators"] for each in AFTER.get(name, silent)(read.values))
        read.problems += [Problem(f"{path}.{key}", value, wanted) for key, value, wanted in found]
    return read


def is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _names(node: Node, given: Values) -> dict[str, str]:
    """The field of each key that may be given.

    A field with an alias is read from the alias where both are given.
    """
    names = {}
    for name, each in node["properties"].items():
        alias = each.get("alias", name)
        names[alias if alias in given else name] = name
    return names


def _defaults(node: Node) -> Values:
    fields = node["properties"].items()
    return {name: _defaults(each) if "properties" in each else each.get("default") for name, each in fields}


def _unknown(key: str, node: Node, path: str, index: int) -> str:
    """The message about an unknown key, the ``index``-th problem.

    It has no suggestion where no error would list it.
    """
    known = [each.get("alias", name) for name, each in node["properties"].items()]
    near = near_miss(key, known) if index < MOST_PROBLEMS else []
    hint = f"did you mean {path}.{near[0]}?" if near else f"keys of {path}: {_keys(node)}"
    return f"no such key in DeepSpeed {schema().version}; {hint}"


def _keys(node: Node) -> str:
    names = [each.get("alias", name) for name, each in node["properties"].items()]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _given_twice(node: Node, names: dict[str, str], given: Values, path: str) -> Iterator[Problem]:
    keys = {names[key]: key for key in given if key in names}
    for name, each in node["properties"].items():
        new = each.get("replaced_by")
        if name in keys and new in keys:
            yield Problem(f"{path}.{name}", given[keys[name]], f"nothing: {path}.{keys[new]} takes its place")


def _value(node: Node, name: str, raw: Any, path: str) -> tuple[Any, list[Problem]]:
    each = node["properties"][name]
    validators = node["validators"]
    model = next((option for option in each.get("anyOf", [each]) if "properties" in option), None)
    if model is not None:
        if raw is None and model is not each:
            return None, []
        read = read_section(model, raw, path)
        return read.values, read.problems
    for validator in validators:
        wanted, holds = BEFORE.get(validator, {}).get(name, ("", None))
        if holds is not None and not holds(raw):
            return None, [Problem(path, raw, wanted)]
    if COERCES in validators and isinstance(raw, str):
        raw = [raw]
    try:
        found = _adapter(json.dumps(each)).validate_python(raw)
        return (found.value if isinstance(found, Enum) else found), []
    except (ValidationError, OverflowError):
        return None, [Problem(path, raw, TORCH_DTYPE if "instance" in each else accepted(each))]


@functools.cache
def _adapter(node: str) -> TypeAdapter[Any]:
    return TypeAdapter(_type(json.loads(node)))


def _type(node: Node) -> Any:
    """A type for which pydantic accepts the same values as for DeepSpeed's field, a text for a number included."""
    if "anyOf" in node:
        return Union[tuple(_type(option) for option in node["anyOf"])]  # noqa: UP007
    if "instance" in node:
        return Annotated[Any, AfterValidator(_torch_dtype)]
    if "enum" in node:
        if node.get("type") == "integer":
            return Enum("Choice", {f"value{each}": each for each in node["enum"]}, type=int)
        return Literal[tuple(node["enum"])]
    if node.get("type") == "array":
        return list[_type(node["items"])]  # type: ignore[misc]
    bounds = {BOUNDS[key]: node[key] for key in BOUNDS if key in node}
    kind = Path if "format" in node else SCALARS[node["type"]] if "type" in node else Any
    return Annotated[kind, Field(**bounds)] if bounds else kind


def is_torch_dtype(value: Any) -> bool:
    return (type(value).__module__, type(value).__name__) == ("torch", "dtype")


def _torch_dtype(value: Any) -> Any:
    if not is_torch_dtype(value):
        raise ValueError(TORCH_DTYPE)
    return value


# Below are the refusals of the validators of DeepSpeed's models, beyond the types of the fields. A validator's code is
# hashed in ``deepspeed_versions``; a test names those that have changed in the installed version.


def silent(values: Values) -> Refusals:
    """Refuse nothing."""
    return iter(())


def _norm_only_of_sharded_states(values: Values) -> Refusals:
    if not values["compute_grad_norm"] and values["stage"] not in (1, 2):
        yield "compute_grad_norm", False, f"true with stage {values['stage']}: only ZeRO 1 and 2 can leave the norm out"


def _partial_offload(values: Values) -> Refusals:
    offload = values["offload_optimizer"]
    if offload and offload["ratio"] < 1.0 and values["stage"] != 3:
        yield "offload_optimizer.ratio", offload["ratio"], f"1.0 with stage {values['stage']}: ZeRO 3 offloads a part"


def _dynamic_loss_scale(values: Values) -> Refusals:
    if values["enabled"] and values["loss_scale"] == 0:
        for key in ("loss_scale_window", "min_loss_scale"):
            if values[key] <= 0:
                yield key, values[key], "an integer > 0, as loss_scale 0 is a dynamic one"


def _zenflow(values: Values) -> Refusals:
    if values["select_strategy"] not in ("auto", "step", "epoch"):
        yield "select_strategy", values["select_strategy"], "one of 'auto', 'step', 'epoch'"
    for key in ("select_interval", "update_interval"):
        if isinstance(values[key], str) and values[key] != "auto":
            yield key, values[key], "'auto' or an integer >= 1"
    if isinstance(values["update_interval"], int) and values["update_interval"] < 1:
        yield "update_interval", values["update_interval"], "'auto' or an integer >= 1"


AFTER: dict[str, Callable[[Values], Refusals]] = {
    "compute_grad_norm_valid": _norm_only_of_sharded_states,
    "offload_ratio_check": _partial_offload,
    "_validate_dynamic_loss_scale_params": _dynamic_loss_scale,
    "validate_fields": _zenflow,
    # These validators fill in values, or warn.
    "overlap_comm_valid": silent,
    "elastic_checkpoint_deprecated": silent,
    "set_pipeline": silent,
    "_validate_entries": silent,
}
"""Checks of a section whose fields are right, by validator."""


def _is_scale(raw: Any) -> bool:
    found = None if isinstance(raw, bool) else converted(float, raw)
    return found is not None and math.isfinite(found) and found >= 0


def converted(kind: type, raw: Any) -> Any:
    try:
        return kind(raw)
    except (TypeError, ValueError, OverflowError):
        return None


BEFORE: dict[str, dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "_validate_loss_scale": {"loss_scale": ("a finite number >= 0; 0 is a dynamic scale", _is_scale)},
    "_reject_non_integer_scale_params": dict.fromkeys(
        ("loss_scale_window", "min_loss_scale"),
        ("an integer", lambda raw: not isinstance(raw, bool) and converted(int, raw) is not None),
    ),
}
"""(accepted values, test of a value) of a field before it is converted, by validator and field."""

COERCES = "_coerce_container_types"
"""DeepSpeed's validator that turns a text into a list of one, and null into an empty section."""
