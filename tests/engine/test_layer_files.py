"""Checkpoints of a ``deepspeed.PipelineModule`` load at other numbers of stages and of data ranks, with any ZeRO."""

from __future__ import annotations

import gradient_rule as rule
import pytest
import test_pipeline as pipelines
import torch
from ranks import run_on_ranks
from torch import nn

LAYOUTS = [(2, 1), (4, 0), (1, 1), (4, 1), (2, 0), (1, 0), (2, 1)]
"""Stages, and the stage of ZeRO, of which each goes on from the one before."""
MOMENTUM = {"lr": 0.05, "momentum": 0.9}


def engine_of(stages: int, zero: int, tied: bool):
    import deepspeed
    from deepspeed.pipe import PipelineModule

    rule.without_extension()
    deepspeed.init_distributed("gloo")
    pipeline = PipelineModule(
        pipelines.specs(tied), num_stages=stages, loss_fn=rule.token_loss, partition_method="uniform"
    )
    pipelines.same_start(pipeline, pipelines.whole(tied))
    config = rule.config(zero, torch.float32, {"pipeline": stages})
    config |= {"optimizer": {"type": "SGD", "params": MOMENTUM}, "gradient_accumulation_steps": 4}
    config |= {"train_batch_size": 16, "train_micro_batch_size_per_gpu": stages}
    return deepspeed.initialize(model=pipeline, model_parameters=pipeline.parameters(), config=config)[0]


def batches(engine, step: int):
    """This rank's micro-batches of 16 samples, which are the same at every layout."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, rule.V, (16, rule.S + 1), generator=generator)
    for micro in tokens.chunk(4):
        own = micro.chunk(engine.topology.size("dp"))[engine.topology.rank("dp")]
        yield own[:, :-1], own[:, 1:]


def go_on(tied: bool, folder: str, expected: list[float]) -> None:
    pipelines.ATTRIBUTES.clear()
    pipelines.ATTRIBUTES.update({pipelines.TIES: "embedding", "1": "linear", "2": "norm"} if tied else {})
    for step, (stages, zero) in enumerate(LAYOUTS):
        engine = engine_of(stages, zero, tied)
        if step:
            path, _ = engine.load_checkpoint(folder)
            assert path is not None and engine.global_steps == step
        loss = float(engine.train_batch(batches(engine, step)))
        assert abs(loss / expected[step] - 1) <= 1e-5, (step, stages, zero, loss, expected[step])
        engine.save_checkpoint(folder)


def expected_of(tied: bool) -> list[float]:
    model: nn.Module = pipelines.whole(tied).to(torch.float64)
    optimizer, losses = torch.optim.SGD(model.parameters(), **MOMENTUM), []
    for step in range(len(LAYOUTS)):
        tokens = torch.randint(0, rule.V, (16, rule.S + 1), generator=torch.Generator().manual_seed(step))
        loss = rule.token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), rule.CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_runs_go_on_at_other_stages(tied, tmp_path):
    run_on_ranks(4, go_on, tied, str(tmp_path), expected_of(tied), deadline_s=300.0)
