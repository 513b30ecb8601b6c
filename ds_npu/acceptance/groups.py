"""The groups of cases, in the order in which they run: a later one relies on what an earlier one tries."""

from __future__ import annotations

from ds_npu.acceptance import collective_cases, operator_cases, speed_cases, training_cases
from ds_npu.acceptance.case import Group

GROUPS = (
    Group(
        "operators",
        "ds_npu.acceptance.operators",
        "each operator on one NPU, forward and backward, against its reference in float64 on the CPU",
        operator_cases.TOLERANCE,
        'Until it is mended, switch the operator off with a key of "fused_ops" (docs/fused_ops.md): training is slower '
        "then, not wrong. adamw: false for the optimizer, flash_attention: false for attention.",
        operator_cases.operator_cases,
    ),
    Group(
        "collectives",
        "ds_npu.acceptance.collectives",
        "each collective over the NPUs of this machine, up to messages larger than HCCL's buffer",
        collective_cases.TOLERANCE,
        'Run it again; if the same cases fail, look at "When a run hangs" in docs/npu.md, and at npu-smi info. Do not '
        "train over several NPUs before they pass.",
        collective_cases.collective_cases,
    ),
    Group(
        "training",
        "ds_npu.acceptance.training",
        "20 steps with each axis, losses and gradient norms against one process on the CPU in float64",
        training_cases.TOLERANCE,
        "Do not use the axis or the ZeRO stage that fails. If operators or collectives failed, too, those come first.",
        training_cases.training_cases,
        training_cases.unmet,
    ),
    Group(
        "speeds",
        "ds_npu.acceptance.speeds",
        "speeds of this machine, of which ds_npu calibrate makes a profile for estimates",
        speed_cases.TOLERANCE,
        "Estimates go on with published figures; nothing else depends on this.",
        speed_cases.speed_cases,
    ),
)
