"""DeepSpeed's own keys that ask for the same things as the section, or that cannot go with it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from ds_npu.config import Problem
from ds_npu.features.all import DsNpuConfig, switched_on

SIZES = {"sequence_parallel_size": "context", "pipeline.stages": "pipeline"}
"""DeepSpeed's keys that state the size of an axis, which must be the size in ``parallel``."""

LIKE_THE_SECTION = ("ds_npu", "npu", "deepspeed_npu")


def value_at(ds_config: dict[str, Any], path: str) -> Any:
    """The value at a dotted path; None where it is missing, or "auto" (not known yet)."""
    value: Any = ds_config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return None if value == "auto" else value


def zero_stage(ds_config: dict[str, Any]) -> int | None:
    """The ZeRO stage that the config asks for; None where it is not a stage ("auto", or wrong: DeepSpeed says so)."""
    zero = ds_config.get("zero_optimization", False)
    if isinstance(zero, dict) and "stage" in zero:
        stage = zero["stage"]
        return stage if stage in (0, 1, 2, 3) else None
    return 1 if zero is True else 0


def conflicts(
    ds_config: dict[str, Any], config: DsNpuConfig, dp: int | None, doubtful: frozenset[str]
) -> Iterator[Problem]:
    """Contradictions between DeepSpeed's keys and the section; nothing is said about keys that are ``doubtful``."""
    sizes = dict(config.parallel)
    for key, axis in SIZES.items():
        found = value_at(ds_config, key)
        if found not in (None, sizes[axis]) and f"parallel.{axis}" not in doubtful:
            yield Problem(key, found, f"the same as ds_npu.parallel.{axis}, which is {sizes[axis]}")
    found = value_at(ds_config, "data_parallel_size")
    if dp is not None and found not in (None, dp):
        yield Problem("data_parallel_size", found, f"{dp}, what the degrees in ds_npu.parallel leave of the world")
    yield from _other_engines(ds_config, config)
    yield from _recomputed_twice(ds_config, config)


def _other_engines(ds_config: dict[str, Any], config: DsNpuConfig) -> Iterator[Problem]:
    """DeepSpeed's AutoTP and AutoEP bring their own process groups."""
    autotp = value_at(ds_config, "tensor_parallel.autotp_size")
    if autotp not in (None, 0, 1):
        accepted = "0 or 1 beside a ds_npu section (see ds_npu.parallel.tensor): AutoTP replaces its process groups"
        yield Problem("tensor_parallel.autotp_size", autotp, accepted)
    autoep, expert = value_at(ds_config, "expert_parallel.autoep_size"), config.parallel.expert
    if value_at(ds_config, "expert_parallel.enabled") and (autoep not in (None, 1) or expert > 1):
        accepted = f"1, with ds_npu.parallel.expert 1 (found {expert}): AutoEP makes its own process groups"
        yield Problem("expert_parallel.autoep_size", autoep, accepted)


def _recomputed_twice(ds_config: dict[str, Any], config: DsNpuConfig) -> Iterator[Problem]:
    theirs = value_at(ds_config, "activation_checkpointing")
    ours = [path for path, _ in switched_on(config.recompute, "ds_npu.recompute.")]
    if isinstance(theirs, dict) and any(theirs.values()) and ours:
        accepted = f"nothing, or nothing at {', '.join(ours)}: both recompute activations"
        yield Problem("activation_checkpointing", theirs, accepted)


def misspelt(ds_config: dict[str, Any]) -> list[str]:
    """Top-level keys that look like the section's name, and that DeepSpeed would ignore in silence."""
    like = [key for key in ds_config if difflib.get_close_matches(str(key).lower(), LIKE_THE_SECTION, cutoff=0.8)]
    return [f"{key!r} is ignored: the section is called 'ds_npu'" for key in like if key != "ds_npu"]
