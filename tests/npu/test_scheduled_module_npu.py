"""A ``deepspeed.PipelineModule`` in fp16 over simulated NPUs, by ds_npu's schedules and by DeepSpeed's own."""

from __future__ import annotations

from typing import Any

import gradient_rule as rule
import pytest
import torch
from deepspeed import init_distributed
from ranks import run_on_ranks

MICRO_BATCHES, ROUNDED = 4, 4e-3


def engine_of(keys: dict[str, str]) -> Any:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    module = PipelineModule(rule.layers(), num_stages=2, loss_fn=rule.token_loss, partition_method="uniform")
    config = rule.config(1, torch.float16, {}) | {"gradient_accumulation_steps": MICRO_BATCHES}
    config["fp16"] = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    config["ds_npu"] = {"parallel": {"pipeline": 2}, "pipeline": keys}
    return deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)[0]


def batches(engine: Any):
    tokens = rule.samples(rule.MICRO * MICRO_BATCHES).view(MICRO_BATCHES, rule.MICRO, -1)
    return ((each[:, :-1].to(engine.device), each[:, 1:].to(engine.device)) for each in tokens)


def scaled(schedule: str) -> None:
    """Three steps are DeepSpeed's; an overflow in the first stage skips the fourth, and halves the scale, in both."""
    rule.without_extension()
    init_distributed("hccl")
    theirs, ours = engine_of({}), engine_of({"schedule": schedule})
    exact = 0.0 if schedule == "1f1b" else ROUNDED
    for _ in range(3):
        losses = [float(engine.train_batch(batches(engine))) for engine in (theirs, ours)]
        assert abs(losses[1] / losses[0] - 1) <= exact, losses
    norms = [float(engine.get_global_grad_norm()) for engine in (theirs, ours)]
    assert abs(norms[1] / norms[0] - 1) <= exact and norms[0] > rule.CLIP, norms
    before = [weight.detach().clone() for weight in ours.module.parameters()]
    for engine in (theirs, ours):
        assert (engine.skipped_steps, engine.optimizer.cur_scale) == (0, 256)
        if engine.is_first_stage():
            next(iter(engine.module.parameters())).register_hook(lambda gradient: gradient * float("inf"))
        engine.train_batch(batches(engine))
        assert (engine.skipped_steps, engine.optimizer.cur_scale) == (1, 128)
    assert all(torch.equal(each, old) for each, old in zip(ours.module.parameters(), before, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_loss_scale_is_deepspeeds(schedule):
    run_on_ranks(2, scaled, schedule, backend="hccl", sets_device=False)
