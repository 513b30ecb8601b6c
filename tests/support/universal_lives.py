"""Runs that go on from universal checkpoints: ds_npu's in DeepSpeed and in ds_npu, DeepSpeed's in ds_npu."""

from __future__ import annotations

import copy

import deepspeed
import gradient_rule as rule
import layout_lives as lives
import torch
import torch.distributed as dist

STEPS, LATER = 2, 2
UNIVERSAL = {"checkpoint": {"load_universal": True}}


def deepspeeds(stage: int, **keys: object):
    """An engine of DeepSpeed's own, without a section."""
    rule.without_extension()
    config = copy.deepcopy(lives.engine_of("llama", 0, {}, torch.float32)._config._param_dict)
    del config["ds_npu"]
    config["zero_optimization"] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    model = lives.model_of("llama", torch.float32)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config | keys)[0]
    assert not hasattr(engine, "topology")
    return engine


def step_of(engine, step: int) -> float:
    """The mean loss of a step of either engine."""
    if hasattr(engine, "topology"):
        return lives.step_of(engine, step, torch.float32)
    share = lives.SAMPLES // dist.get_world_size()
    ids = lives.tokens(step)[share * dist.get_rank() :][:share]
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    losses = [0.0] * dist.get_world_size()
    dist.all_gather_object(losses, loss.item())
    return sum(losses) / len(losses)


def save(cases: list, folder: str) -> None:
    """``cases``: a family, stage and section each, or a stage of DeepSpeed's own."""
    for index, case in enumerate(cases):
        engine = deepspeeds(case) if isinstance(case, int) else lives.engine_of(*case, torch.float32)
        for step in range(STEPS):
            step_of(engine, step)
        engine.save_checkpoint(f"{folder}/{index}")


def go_on(folder: str, cases: list, expected: list[float]) -> None:
    for case in cases:
        is_own = isinstance(case, int)
        engine = deepspeeds(case, **UNIVERSAL) if is_own else lives.engine_of(*case, torch.float32, **UNIVERSAL)
        path, _ = engine.load_checkpoint(folder)
        assert path is not None and engine.global_steps == STEPS, case
        for step in range(STEPS, STEPS + LATER):
            found = step_of(engine, step)
            assert abs(found / expected[step] - 1) <= lives.BOUND, (folder, case, step, found, expected[step])
