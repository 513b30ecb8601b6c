"""The most trained families over simulated NPUs: a step of DeepSpeed's engine over HCCL, against one process.

Over tensor ranks, context ranks and, of families with experts, expert ranks; with ZeRO 1 and what is on by default on
NPUs. Gradients in bf16 are within twice the error of one process on an NPU.
"""

from __future__ import annotations

import gradient_rule as rule
import pytest
import tensor_parallel_rule as tensor_rule
import torch
from ranks import run_on_ranks

OF_EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe")
FAMILIES = (
    "qwen3_next",
    "llama",
    *OF_EXPERTS,
    "qwen2",
    "qwen3",
    "qwen3_5",
    "gemma2",
    "phi3",
    "mamba2",
    "bamba",
    "lfm2",
)
AXES = ("tensor", "context", "expert")
EVERY_EXPERT: dict[str, object] = {"num_experts_per_tok": 4}
"""All experts of each token: whom a router chooses is not continuous, and rounding can change it (Mixtral's did)."""
IN_GROUPS = ("deepseek_v3", "glm4_moe")


def steps(family: str, axes: tuple[str, ...]) -> None:
    """A step over each of the axes; every one is tried before the first that is wrong is told."""
    held: dict[str, tuple[bool, tensor_rule.Errors, float]] = {}
    changes = {} if "expert" not in axes else EVERY_EXPERT | ({"topk_group": 2} if family in IN_GROUPS else {})
    for axis in axes:
        dp = 2 if axis == "expert" else 1
        expected = tensor_rule.reference(family, dp, dtype=torch.float64, start=torch.bfloat16, **changes)
        # The engine first: nothing here sets the device.
        section = {"parallel": {axis: 2}}
        errors = tensor_rule.engine_step(family, 1, torch.bfloat16, section, expected, **changes)
        one = {"dtype": torch.bfloat16, "start": torch.bfloat16, "device": "npu"}
        single = tensor_rule.reference(family, dp, **one, **changes)
        bound = 2 * rule.relative(single.gradients, expected.gradients)
        held[axis] = max(errors.gradient, errors.norm) <= bound and errors.loss <= 4e-3, errors, bound
    assert all(right for right, *_ in held.values()), (family, held)


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step(family):
    axes = AXES if family in ("qwen3_next", *OF_EXPERTS) else AXES[:2]
    run_on_ranks(2, steps, family, axes, backend="hccl", sets_device=False, deadline_s=900.0)
