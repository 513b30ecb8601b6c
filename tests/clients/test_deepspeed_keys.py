"""DeepSpeed's own keys beside a section, on each axis: losses are those of one process, what they write is right.

ZeRO-Offload, the second copy of weights of ZeRO++, the monitor, the flops profiler, the autotuner's measuring run.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import gradient_rule as rule
import pytest
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_on_ranks

SAMPLES, LENGTH, STEPS, LR, CLIP = 4, 12, 3, 0.5, 0.1
EXACT = 1e-6
"""ZeRO keeps its masters in float32."""
LAYOUTS = {"data": {}, "tensor": {"tensor": 2}, "context": {"context": 2}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
KEYS = {
    "nothing": {"stage": 0},
    "offload, ZeRO 1": {"stage": 1, **OFFLOAD},
    "offload, ZeRO 2": {"stage": 2, **OFFLOAD},
    "offload, ZeRO 3": {"stage": 3, **OFFLOAD, "offload_param": {"device": "cpu"}},
    "second copies": {"stage": 3, "zero_hpz_partition_size": 2},
}
"""``zero_optimization``; hpZ is ZeRO++'s key that needs no kernel of CUDA's."""


def config(layout: str, zero: dict[str, object], **more: object) -> dict[str, object]:
    return {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "ds_npu": {"parallel": LAYOUTS[layout]},
        **more,
    }


def one_process() -> list[float]:
    """The losses of plain PyTorch on the whole batch."""
    model, tokens, found = tiny_models.tiny("llama"), tiny_models.tokens(SAMPLES, LENGTH), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(STEPS):
        with tiny_models.Float64():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def engine_of(ds_config: dict[str, object]):
    import deepspeed

    rule.without_extension()
    model = tiny_models.tiny("llama")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    return engine


def train(engine, steps: int = STEPS) -> list[float]:
    """This rank's losses on its data rank's samples, the same in each step."""
    dp = engine.topology.size("dp")
    tokens = tiny_models.tokens(SAMPLES, LENGTH).view(dp, SAMPLES // dp, LENGTH)[engine.topology.rank("dp")]
    found = []
    for _ in range(steps):
        with tiny_models.Float64():
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def mean_over_data(engine, found: list[float]) -> list[float]:
    every: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, found)
    assert engine.topology.size("dp") > 1 or every[0] == every[1]
    return [sum(each) / len(each) for each in zip(*every, strict=True)]


def hold_to_one_process(layout: str, titles: list[str]) -> None:
    from deepspeed.utils import groups

    expected = one_process()
    assert expected[-1] < expected[0] - 0.01
    for title in titles:
        engine = engine_of(config(layout, KEYS[title]))
        found = mean_over_data(engine, train(engine))
        assert found == pytest.approx(expected, rel=EXACT), (layout, title)
        engine.destroy()
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


@pytest.mark.slow
@pytest.mark.matrix(corners=3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_offload_and_second_copies(layout):
    titles = [title for title in KEYS if (layout, title) != ("tensor", "second copies")]
    run_on_ranks(2, hold_to_one_process, layout, titles)


def write_what_was_seen(layout: str, folder: str) -> None:
    written = Path(folder) / layout
    monitor = {"enabled": True, "output_path": str(written), "job_name": "run"}
    profiler = {"enabled": True, "profile_step": 1, "output_file": str(written / "flops.txt")}
    engine = engine_of(config(layout, {"stage": 1}, csv_monitor=monitor, flops_profiler=profiler))
    train(engine)
    if dist.get_rank() == 0:
        with (written / "run" / "Train_Samples_lr.csv").open() as file:
            rows = list(csv.reader(file))[1:]
        assert [(int(step), float(rate)) for step, rate in rows] == [(SAMPLES * n, LR) for n in range(1, STEPS + 1)]
        # The profiler counts calls of torch's functions by name, and attention over context ranks makes none of those.
        unseen = attention_multiplications() if layout == "context" else 0
        assert engine.flops_profiler.macs * 2 == multiplications() - unseen, (layout, engine.flops_profiler.macs)
        said = (written / "flops.txt").read_text()
        assert "fwd flops of model = fwd flops per GPU * mp_size" in said
        assert [*map(int, find(said, "model parallel size"))] == [2 if layout == "tensor" else 1]
    engine.destroy()


def attention_multiplications() -> int:
    """Scores and their product with the values, in a forward of one process on the whole batch."""
    sizes = tiny_models.config_of("llama")
    return 2 * sizes.num_hidden_layers * SAMPLES * LENGTH * LENGTH * sizes.hidden_size


def find(text: str, title: str) -> list[str]:
    return [line.split(":")[1].strip() for line in text.splitlines() if line.startswith(title)]


def multiplications() -> int:
    """Of a forward of one process on the whole batch, by DeepSpeed's own profiler."""
    from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler

    model, tokens = tiny_models.tiny("llama"), tiny_models.tokens(SAMPLES, LENGTH)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    with tiny_models.Float64():
        model(input_ids=tokens, labels=tokens)
    found = profiler.get_total_macs()
    profiler.end_profile()
    return int(found)


@pytest.mark.slow
@pytest.mark.matrix(corners=3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_monitor_and_the_profiler_write_what_was_computed(layout, tmp_path):
    run_on_ranks(2, write_what_was_seen, layout, str(tmp_path))


def measure(layout: str, folder: str) -> None:
    path = Path(folder) / f"{layout}.json"
    sharing = {"data": 1, "tensor": 2, "context": 2}[layout]
    tuned = {"enabled": True, "start_profile_step": 1, "end_profile_step": 2, "metric_path": str(path)}
    engine = engine_of(config(layout, {"stage": 1}, autotuning=tuned | {"mp_size": sharing}))
    with pytest.raises(SystemExit):
        train(engine, 4)
    dist.barrier()
    if dist.get_rank() == 0:
        metric = json.loads(path.read_text())
        assert metric["throughput"] == pytest.approx(SAMPLES * 1e6 / metric["latency"])
        assert metric["FLOPS_per_gpu"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_autotuners_measuring_run_counts_the_batch_once(layout, tmp_path):
    run_on_ranks(2, measure, layout, str(tmp_path))
