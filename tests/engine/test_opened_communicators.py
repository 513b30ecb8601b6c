"""Over gloo ds_npu opens no communicator: HCCL's keys and lines concern NPUs alone; tests/npu has those."""

from __future__ import annotations

import logging
from unittest import mock

import gradient_rule as rule
import tiny_models
import torch
from ranks import run_on_ranks

from ds_npu.comm import communicator
from ds_npu.log import logger


class Lines(logging.Handler):
    """Keeps the log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def gloo() -> None:
    import deepspeed

    rule.without_extension()
    kept, model = Lines(), tiny_models.tiny("llama", torch.float32)
    logger().addHandler(kept)
    section = {"parallel": {"tensor": 2}, "hccl": {"buffer_mib": {"world": 7}}}
    config = rule.config(1, torch.float32, {}) | {"ds_npu": section}
    with mock.patch.object(communicator, "_backend") as asked:
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    asked.assert_not_called()
    assert kept.lines or torch.distributed.get_rank() == 1
    assert not [line for line in kept.lines if "communicator" in line]


def test_over_gloo_nothing_is_opened():
    run_on_ranks(2, gloo)
