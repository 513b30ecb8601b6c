"""Step time and tokens per second, counted against the batch, and written by DeepSpeed's own monitor."""

from __future__ import annotations

import csv
from pathlib import Path

import gradient_rule
import pytest
import tiny_models
import torch
from ranks import run_on_ranks

from ds_npu.features.watch.throughput import STEP_TIME, TOKENS, Throughput

STEPS, SAMPLES, LENGTH, ACCUMULATION = 4, 2, 8, 3


def test_events_of_a_step():
    throughput = Throughput(ranks=4)
    ids = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)
    assert throughput.events(1.0, 8) == []  # nobody has seen the first step begin
    throughput.count(({"pixel_values": torch.zeros(7, 9), "input_ids": ids}, ()))
    throughput.count(((), (ids,)))
    assert throughput.events(1.0, 8) == []  # no step has ended
    assert throughput.events(3.0, 16) == [(STEP_TIME, 2000.0, 16), (TOKENS, 4 * 2 * SAMPLES * LENGTH / 2.0, 16)]
    assert throughput.events(3.5, 24) == [(STEP_TIME, 500.0, 24)]  # a model without tokens


def train_with_a_monitor(folder: str, section: dict) -> None:
    import deepspeed

    gradient_rule.without_extension()
    model = tiny_models.tiny("llama", torch.float32, num_hidden_layers=4)
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"},
        "ds_npu": section,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    ids = tiny_models.tokens(SAMPLES, LENGTH)
    for _ in range(STEPS * ACCUMULATION):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


STAGES = {"parallel": {"pipeline": 2}, "pipeline": {"schedule": "zb_v"}}


@pytest.mark.slow
@pytest.mark.parametrize("section", [{"parallel": {"tensor": 2}}, STAGES], ids=["tensor", "stages"])
def test_the_monitor_writes_them(tmp_path, section):
    run_on_ranks(2, train_with_a_monitor, f"{tmp_path}", section)
    times, speeds = (rows_of(tmp_path, event) for event in (STEP_TIME, TOKENS))
    assert [step for step, _ in times] == [step for step, _ in speeds] == [6 * step for step in range(2, STEPS + 1)]
    for (_, milliseconds), (_, speed) in zip(times, speeds, strict=True):
        # Tensor and pipeline ranks share their tokens.
        assert speed * milliseconds / 1000 == pytest.approx(ACCUMULATION * SAMPLES * LENGTH, rel=1e-6)


def rows_of(folder: Path, event: str) -> list[tuple[int, float]]:
    """Samples and values of a file of the csv monitor."""
    (file,) = folder.rglob(f"{event.replace('/', '_')}.csv")
    rows = list(csv.reader(file.open()))[1:]
    return [(int(float(step)), float(value)) for step, value in rows]
