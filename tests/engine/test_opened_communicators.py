"""Over gloo ds_npu asks for no communicator of HCCL: that concerns NPUs alone, and tests/npu has it."""

from __future__ import annotations

from unittest import mock

import gradient_rule as rule
import tiny_models
import torch
from ranks import run_on_ranks

from ds_npu.comm import communicator


def gloo() -> None:
    import deepspeed

    rule.without_extension()
    model = tiny_models.tiny("llama", torch.float32)
    section = {"parallel": {"tensor": 2}, "hccl": {"buffer_mib": {"world": 7}}}
    config = rule.config(1, torch.float32, {}) | {"ds_npu": section}
    with mock.patch.object(communicator, "_backend") as asked:
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    asked.assert_not_called()


def test_over_gloo_nothing_is_opened():
    run_on_ranks(2, gloo)
