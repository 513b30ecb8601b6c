"""``ds_npu.fused_ops``: operators in one NPU kernel each, in place of the model's own.

A key that is left out: ds_npu's operator on NPUs, where torch_npu has the kernel and the kernel passes a check against
its reference; the model's own on the CPU. ``true``: ds_npu's operator on the CPU, too, where it computes in plain
PyTorch. ``false``: the model's own.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import Any

from ds_npu import capability
from ds_npu.config.fused_ops import FusedOpsSection
from ds_npu.features.build import Build, Feature
from ds_npu.features.declaration import Change, Phase
from ds_npu.features.fused_ops.fused_model import declare_operators, fused_keys
from ds_npu.models.plan import PlanError
from ds_npu.ops.adamw import adamw_
from ds_npu.ops.attention import attention_backward, attention_forward
from ds_npu.ops.layers import cross_entropy, rms_norm, rotary, swiglu
from ds_npu.ops.matmul_accumulate import matmul_accumulate_
from ds_npu.ops.operator import Operator
from ds_npu.zero_ext.gradient_buffer import install_gradient_buffers

OPERATORS_OF_KEY: dict[str, tuple[Operator[..., Any], ...]] = {
    "flash_attention": (attention_forward, attention_backward),
    "rms_norm": (rms_norm,),
    "swiglu": (swiglu,),
    "rotary": (rotary,),
    "cross_entropy": (cross_entropy,),
    "adamw": (adamw_,),
    "matmul_accumulate": (matmul_accumulate_,),
}
NOT_IN_THE_MODEL = ("adamw", "matmul_accumulate")
"""Keys of operators that the optimizer and weight gradients use."""


def _unmet(section: FusedOpsSection) -> list[str]:
    asked = [key for key, value in section if value and key in OPERATORS_OF_KEY]
    # On the CPU every operator has its reference.
    if not asked or os.environ.get("DS_ACCELERATOR") == "cpu" or not capability.torch_npu_state().usable:
        return []
    reasons = {
        key: next(filter(None, (operator.why_unavailable() for operator in OPERATORS_OF_KEY[key])), None)
        for key in asked
    }
    return [f"{key}: kernel not available: {reason}" for key, reason in reasons.items() if reason]


@functools.cache
def _wrong(key: str, device_type: str) -> str | None:
    """Why the kernels of ``key`` are not used; checked once in a process, since the host waits for the device."""
    return next(filter(None, (operator.check(device_type) for operator in OPERATORS_OF_KEY[key])), None)


def _chosen(section: FusedOpsSection, build: Build) -> dict[str, str | None]:
    """The keys of the operators to be used, and why their kernels cannot be."""
    on_npu = build.device_type == "npu"
    chosen = [key for key, value in section if key in OPERATORS_OF_KEY and (value or (on_npu and value is None))]
    checked = on_npu and not build.is_planned
    return {key: _wrong(key, build.device_type) if checked else None for key in chosen}


def _parts(section: FusedOpsSection, build: Build) -> Iterable[Change]:
    if section.adamw is False:
        yield Change("provides", "AdamW", "PyTorch's own", _set_adamw_aside)
    if "matmul_accumulate" in (chosen := _chosen(section, build)) and chosen["matmul_accumulate"] is None:
        what = "added up in the optimizer's buffers, where it has some"
        yield build.installed("weight gradients", what, install_gradient_buffers)


def _set_adamw_aside() -> None:
    for operator in OPERATORS_OF_KEY["adamw"]:
        operator.set_aside("ds_npu.fused_ops.adamw is false", "leave it out to use the kernel")


def _declare(section: FusedOpsSection, build: Build) -> Iterable[Change]:
    chosen = _chosen(section, build)
    notes = [f"{key} is left as it is: {reason}" for key, reason in chosen.items() if reason]
    elsewhere = (*NOT_IN_THE_MODEL, *(["flash_attention"] if build.shards_sequences else []))
    wanted = [key for key, reason in chosen.items() if reason is None and key not in elsewhere]
    must = any(value for key, value in section if key in wanted)
    changes, lines = _operators(wanted, build, must) if wanted else ([], [])
    build.notes += [f"fused_ops: {line}" for line in (*notes, *lines)]
    return changes


def _operators(wanted: list[str], build: Build, must: bool) -> tuple[list[Change], list[str]]:
    """The changes, and lines that say where each operator goes.

    Where nothing is known of the model's modules, or not of all and tensor ranks shard them, raises PlanError if an
    operator ``must`` be in the model, and else says so in a line.
    """
    if fused_keys(build.model).issuperset(wanted):
        # Sharded and fused before: the modules of the model are no longer those of a plan.
        return [], [f"the model computes with {', '.join(wanted)} already"]
    try:
        plan = build.block_plan
        if not plan.roles:
            plan = build.plan
    except PlanError as error:
        if must:
            raise
        unknown = f"none in {type(build.model).__name__}, whose modules are not known ({error.problems[0]}"
        more = len(error.problems) - 1
        return [], [f"{unknown}{f', and {more} more' if more else ''}); ds_npu.plan can say what they are"]
    return declare_operators(build.model, plan, wanted)


FUSED_OPS: Feature[FusedOpsSection] = Feature(
    "fused_ops", Phase.OPERATORS, declare=_declare, parts=_parts, unmet=_unmet
)
