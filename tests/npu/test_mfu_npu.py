"""On simulated NPUs: FLOP of a step with kernels of attention and grouped products are those of hand formulas."""

from __future__ import annotations

from counted_steps import ACCUMULATION, BY_HAND, step_of
from ranks import run_on_ranks

ATTENTION = {"fused_ops": {"flash_attention": True}}


def kernels() -> None:
    for family, section in (("llama", ATTENTION), ("qwen2", ATTENTION), ("mixtral", {})):
        found = step_of(family, section)
        assert found.model == ACCUMULATION * BY_HAND[family], (family, found, ACCUMULATION * BY_HAND[family])


def test_flop_of_kernels():
    run_on_ranks(1, kernels, backend="hccl", sets_device=False)
