"""Gradients of several batches, accumulated in every way that DeepSpeed has, in pipeline stages."""

from __future__ import annotations

import accumulations
import pytest
import torch
from pipeline_rule import EXACT, SINGLE, hold_all
from ranks import run_on_ranks

BFLOAT16 = 2e-2
"""A batch that is forgotten changes gradients by more than a tenth."""


def section(schedule: str) -> dict:
    return {"parallel": {"pipeline": 2}, "pipeline": {"schedule": schedule}}


def every_way(schedules: tuple[str, ...]) -> None:
    """gpt2 has one weight in its first and its last stage."""
    for schedule in schedules:
        for stage in (0, 1, 2):
            accumulations.hold("gpt2", section(schedule), stage, torch.float64, EXACT)
    accumulations.hold("llama", section("zb_v"), 1, torch.float32, SINGLE)
    for stage in (0, 1):
        accumulations.hold("llama", section("zb_h1"), stage, torch.bfloat16, BFLOAT16)
    accumulations.refused(section("1f1b"))


def test_every_way():
    run_on_ranks(2, every_way, ("1f1b", "zb_v"))


@pytest.mark.slow
def test_every_way_with_data_ranks():
    run_on_ranks(4, every_way, ("zb_h1", "1f1b"))


def test_gradients_where_they_are_sent_from():
    """Buckets of ZeRO hold what is accumulated, while the next batch is computed."""
    run_on_ranks(4, hold_all, "llama", (1, 2), [section("1f1b"), section("zb_v")], {})
