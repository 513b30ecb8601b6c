"""Batches inside of engine.no_sync() count in pipeline stages on simulated NPUs, too."""

from __future__ import annotations

import accumulations
import pytest
import torch
from pipeline_rule import SINGLE
from ranks import run_on_ranks

BOUND = 100 * SINGLE
"""Kernels of float32 round; a batch that is forgotten changes gradients by more than a tenth."""
SECTION = {"parallel": {"pipeline": 2}, "pipeline": {"schedule": "zb_h1"}}


@pytest.mark.slow
def test_every_way_in_float32():
    run_on_ranks(2, accumulations.hold, "llama", SECTION, 1, torch.float32, BOUND, backend="hccl", sets_device=False)
