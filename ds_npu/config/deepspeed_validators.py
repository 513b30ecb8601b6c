"""The validators of DeepSpeed's models, by name: their refusals beyond the types of the fields.

A validator's code is hashed in ``deepspeed_versions``; a test names those that have changed in the installed version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

Values = dict[str, Any]
Refusals = Iterator[tuple[str, Any, str]]
"""(key, found value, accepted values) of each refusal."""


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
"""The validator that takes a text for a list of one, and null for an empty section."""
