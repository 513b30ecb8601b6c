"""``ds_npu.watch.stall_factor`` in a world of ranks: one stops within a step, and every rank says where it stands."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

import gradient_rule as rule
import pytest
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_on_ranks

STEPS, STANDSTILL_S = 8, 4.0


def one_rank_stops(folder: str) -> None:
    import deepspeed

    from ds_npu.features.watch import stalls, watches

    rule.without_extension()
    watches.StallWatch = functools.partial(stalls.StallWatch, least=1.5, pause=60.0)
    stalls.LOOK_EVERY_SECONDS = 0.05
    log = os.open(Path(folder) / f"rank {dist.get_rank()}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 2)
    config = rule.config(1, torch.float32, {}) | {"gradient_accumulation_steps": 1}
    config["ds_npu"] = {"parallel": {"tensor": 2}, "watch": {"stall_factor": 3}}
    models = [tiny_models.tiny("llama", torch.float32) for _ in range(2)]
    # The script finishes with the first engine, and does not stand still while it uses the second.
    engines = [
        deepspeed.initialize(model=each, model_parameters=each.parameters(), config=config)[0] for each in models
    ]
    ids = tiny_models.tokens(2, 9)
    for engine, steps in zip(engines, (STEPS // 2, STEPS), strict=True):
        for step in range(steps):
            loss = engine(input_ids=ids, labels=ids).loss
            if step == STEPS - 1 and dist.get_rank() == 1:
                time.sleep(STANDSTILL_S)  # the rank that is late
            engine.backward(loss)
            engine.step()
            # The watch looks after each step.
            time.sleep(0.1)


@pytest.mark.slow
def test_every_rank_says_where_it_stands(tmp_path):
    run_on_ranks(2, one_rank_stops, str(tmp_path))
    waiting, late = ((tmp_path / f"rank {rank}").read_text() for rank in range(2))
    for rank, said in enumerate((waiting, late)):
        reports = [line for line in said.splitlines() if line.startswith("[ds_npu] WARNING: rank")]
        assert len(reports) == 2, said
        assert reports[0].startswith(f"[ds_npu] WARNING: rank {rank} of 2 has stood still for ")
        assert f"after step {STEPS - 1} (the median step takes" in reports[0]
        assert reports[1].startswith(f"[ds_npu] WARNING: rank {rank} of 2 goes on, after ")
    assert "time.sleep(STANDSTILL_S)  # the rank that is late" in late
    assert "in one_rank_stops: engine.backward(loss)" in waiting
