"""``ds_npu.fused_ops``: operators in one NPU kernel each, in place of the model's own.

A key that is left out: ds_npu's operator on NPUs, where torch_npu has the kernel and the kernel passes a check against
its reference; the model's own on the CPU. ``true``: ds_npu's operator on the CPU, too, where it computes in plain
PyTorch. ``false``: the model's own.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from ds_npu import capability
from ds_npu.config.fused_ops import FusedOpsSection
from ds_npu.features.build import Build
from ds_npu.features.feature import Feature
from ds_npu.features.fused_ops.fused_model import fuse, fused_keys
from ds_npu.log import logger
from ds_npu.models.plan import PlanError
from ds_npu.ops.adamw import adamw_
from ds_npu.ops.attention import attention_backward, attention_forward
from ds_npu.ops.cross_entropy import cross_entropy
from ds_npu.ops.matmul_accumulate import matmul_accumulate_
from ds_npu.ops.operator import Operator
from ds_npu.ops.rms_norm import rms_norm
from ds_npu.ops.rotary import rotary
from ds_npu.ops.swiglu import swiglu
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
"""By key, the operators it switches."""
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


def _apply(section: FusedOpsSection, build: Build) -> None:
    values = {key: value for key, value in section if key in OPERATORS_OF_KEY}
    on_npu = build.device_type == "npu"
    if values["adamw"] is False:
        for operator in OPERATORS_OF_KEY["adamw"]:
            operator.set_aside("ds_npu.fused_ops.adamw is false", "leave it out to use the kernel")
    chosen = [key for key, value in values.items() if value or (on_npu and value is None)]
    refused = {key: reason for key in chosen if on_npu and (reason := _wrong(key, build.device_type))}
    said = [f"{key} is left as it is: {reason}" for key, reason in refused.items()]
    elsewhere = (*NOT_IN_THE_MODEL, *(["flash_attention"] if build.shards_sequences else []))
    wanted = [key for key in chosen if key not in refused and key not in elsewhere]
    if wanted:
        said += _fuse(wanted, build, must=any(values[key] for key in wanted))
    if "matmul_accumulate" in set(chosen) - set(refused):
        build.when_built.append(install_gradient_buffers)
    for line in said:
        logger().info("fused_ops: %s", line)


def _fuse(wanted: list[str], build: Build, must: bool) -> list[str]:
    """Lines that say where each operator is; raises PlanError for an unknown model if an operator ``must`` be in it."""
    if fused_keys(build.model).issuperset(wanted):
        # Sharded and fused before: the modules of the model are no longer those of a plan.
        return []
    try:
        plan = build.plan
    except PlanError as error:
        if must:
            raise
        unknown = f"none in {type(build.model).__name__}, whose modules are not known ({error.problems[0]}"
        more = len(error.problems) - 1
        return [f"{unknown}{f', and {more} more' if more else ''}); ds_npu.plan can say what they are"]
    return fuse(build.model, plan, wanted)


FUSED_OPS: Feature[FusedOpsSection] = Feature("fused_ops", unmet=_unmet, apply=_apply)
