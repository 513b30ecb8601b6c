"""The gradient rule: every family, tensor and data ranks, sequence parallelism, ZeRO 0-3, against one process."""

from __future__ import annotations

import gradient_rule as rule
import pytest
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
from ranks import run_on_ranks

EXACT = 1e-12
SINGLE = 1e-6
"""ZeRO keeps its masters, and most of its norms, in float32, whatever the model."""
STAGES = (0, 1, 2, 3)


def exact_steps(family: str, tensor: int, stages: tuple[int, ...], changes: dict[str, object]) -> None:
    import torch.distributed as dist

    rule.without_extension()
    expected = tensor_rule.reference(family, dist.get_world_size() // tensor, **changes)
    for sequence_parallel in (False, True) if tensor > 1 else (False,):
        section = {"parallel": {"tensor": tensor, "sequence_parallel": sequence_parallel}}
        for stage in stages:
            errors = tensor_rule.engine_step(family, stage, torch.float64, section, expected, **changes)
            where = (family, tensor, sequence_parallel, stage, errors)
            assert errors.loss <= EXACT and errors.gradient <= EXACT, where
            loose = EXACT if stage == 0 else SINGLE
            assert errors.norm <= loose and errors.weight <= loose, where


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_a_family_on_two_ranks_with_every_stage(family):
    run_on_ranks(2, exact_steps, family, 2, STAGES, {})
