"""Experts that move between simulated NPUs, and replicas of them, over HCCL: training goes on as without."""

from __future__ import annotations

import pytest
import relocation_rule as rule
import torch
from ranks import run_on_ranks

ROUNDED = 1e-5


def hold(stage: int) -> None:
    plain = rule.train(rule.engine_of("mixtral", stage, torch.float32, {"expert": 2}, {}), range(4), torch.float32)
    for moe in ({"placement_interval": 1}, {"replica_rows": 1}):
        engine = rule.engine_of("mixtral", stage, torch.float32, {"expert": 2}, moe)
        found = rule.train(engine, range(4), torch.float32)
        assert found.relocations >= 2 or "placement_interval" not in moe
        assert rule.difference(found, plain) <= ROUNDED, (stage, moe, rule.difference(found, plain))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_training_goes_on_as_without(stage):
    run_on_ranks(2, hold, stage, backend="hccl", sets_device=False, deadline_s=600.0)
