"""ZeRO 3 with overlapped communication, where the host waits for nothing between steps: every run is the same."""

from __future__ import annotations

import gradient_rule as rule
import tensor_parallel_rule as dense
import tiny_models
import torch
from ranks import run_on_ranks

RUNS = 6


def runs() -> None:
    import deepspeed

    rule.without_extension()
    found = []
    for index in range(RUNS):
        model = tiny_models.tiny("llama", torch.float32, num_hidden_layers=4).to(torch.bfloat16)
        config = dense.config(3, torch.bfloat16, {})
        # Without it gathers are on the stream of the step.
        config["zero_optimization"]["overlap_comm"] = index > 0
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        losses = []
        for ids in dense.batches(3 * rule.MICRO * rule.ACCUMULATION).to(engine.device).split(rule.MICRO):
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        found.append([loss.item() for loss in losses])
    assert all(each == found[0] for each in found), found


def test_gathers_read_what_the_step_has_written():
    run_on_ranks(2, runs, backend="hccl", sets_device=False)
