"""The expert view on simulated NPUs: toy experts in DeepSpeed's engine over HCCL, against one process on the CPU."""

from __future__ import annotations

import pytest
import torch
import toy_experts
from ranks import run_on_ranks


def all_stages(parallel: dict[str, int]) -> None:
    for stage in (0, 1, 2, 3):
        toy_experts.step(stage, parallel, torch.float32)


@pytest.mark.parametrize("parallel", [{"expert": 2}, {"expert": 2, "tensor": 2}, {"expert": 2, "context": 2}], ids=str)
def test_experts_train_as_in_one_process(parallel):
    run_on_ranks(2, all_stages, parallel, backend="hccl", sets_device=False)
