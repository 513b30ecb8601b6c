"""``ds_npu.memory_report`` on simulated NPUs: what it says is what the allocator and the device have counted."""

from __future__ import annotations

import gc
from unittest import mock

import deepspeed
import gradient_rule as rule
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
from ranks import run_on_ranks

from ds_npu.features.memory_report import reported_step as feature
from ds_npu.memory.memory_use import OPTIMIZER, REST, WEIGHTS, MemoryUse

MIB = 2**20
SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}


def reported(stage: int, section: dict[str, object]) -> None:
    """The report of this rank against the device, asked behind the second step."""
    gc.collect()
    before = torch.npu.memory_allocated()  # DeepSpeed keeps some of the engine before.
    uses: list[MemoryUse] = []
    config = tensor_rule.config(stage, torch.bfloat16, section | {"memory_report": True})
    config["zero_optimization"] |= {"reduce_bucket_size": MIB, "allgather_bucket_size": MIB}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    model = tiny_models.tiny("llama", torch.float32, **SIZES).to(torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    with mock.patch.object(feature, "_report", lambda engine, use, picture: uses.append(use)):
        for ids in tensor_rule.batches(2 * rule.MICRO * rule.ACCUMULATION).to(engine.device).split(rule.MICRO):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
    peak, reserved = torch.npu.max_memory_allocated(), torch.npu.max_memory_reserved()
    free, total = torch.npu.mem_get_info()
    (use,) = uses
    where = (stage, section, use.at_peak)
    assert (use.peak, use.reserved) == (peak, reserved), where
    assert use.outside == total - free - torch.npu.memory_reserved() and use.outside >= 2 * MIB, where
    weights = sum(weight.numel() for weight in model.parameters())
    if stage < 3:
        assert 2 * weights <= use.at_peak[WEIGHTS] <= 2.1 * weights, where
        # Masters and two moments in float32, of half of the weights.
        data = engine.topology.size("dp")
        assert 12 * weights / data <= use.at_peak[OPTIMIZER] <= 12.1 * weights / data, where
    # The mask of attention has 4 MiB.
    assert 0 <= use.at_peak[REST] - before <= 4 * MIB + 0.05 * peak, (where, before)


def reports() -> None:
    rule.without_extension()
    for stage, parallel in ((1, {}), (3, {}), (1, {"tensor": 2})):
        reported(stage, {"parallel": parallel})


def test_a_report_is_what_the_device_has_counted():
    run_on_ranks(2, reports, backend="hccl", sets_device=False)
