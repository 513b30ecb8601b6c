"""Steps with counted loads: biases, events of the monitor and the picture, against counts of one process."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import deepspeed
import gradient_rule as rule
import tensor_parallel_rule as dense
import tiny_models
import torch
import torch.distributed as dist

from ds_npu.parallel import record_routing

STEPS, RATE = 3, 0.02
NAME = "model.layers.1.mlp"


def choices_of_a_step(model: torch.nn.Module, dp: int, block: str = NAME) -> torch.Tensor:
    """[micro-batches, E]: how often one process, in float64, chooses each expert of a layer in a step."""
    with record_routing(model) as record, torch.no_grad():
        for micro in dense.batches(rule.MICRO * rule.ACCUMULATION * dp).split(rule.MICRO):
            dense.loss_of(model, micro, torch.float64)
    chosen = record.choices[block]
    # Of several top-k of one forward (groups first) the last is that of experts.
    per_forward = len(chosen) // (rule.ACCUMULATION * dp)
    return torch.stack([each.flatten().bincount(minlength=4) for each in chosen[per_forward - 1 :: per_forward]])


def engine_of(model: torch.nn.Module, section: dict, stage: int, **more: object):
    rule.without_extension()
    dtype = next(model.parameters()).dtype
    config = dense.config(stage, dtype, section) | {"steps_per_print": 1} | more
    # The weights stay as they are.
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.0}}
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train(engine, steps: int) -> None:
    dp, dtype = engine.topology.size("dp"), next(engine.module.parameters()).dtype
    tokens = dense.batches(rule.MICRO * rule.ACCUMULATION * dp).view(rule.ACCUMULATION, dp, rule.MICRO, dense.LENGTH)
    for _ in range(steps):
        for micro in tokens[:, engine.topology.rank("dp")]:
            engine.backward(dense.loss_of(engine, micro, dtype))
            engine.step()
        # What is evaluated, or computed without a graph, does not count.
        with torch.no_grad():
            dense.loss_of(engine, tokens[0, 0], dtype)
        engine.eval()
        dense.loss_of(engine, tokens[0, 0], dtype)
        engine.train()


def expected_biases(dp: int) -> torch.Tensor:
    """[E] after STEPS steps, in one process: sign(mean - load), written out."""
    model = tiny_models.tiny("deepseek_v3", torch.float32).double()
    bias = model.get_buffer(f"{NAME}.gate.e_score_correction_bias")
    for _ in range(STEPS):
        chosen = choices_of_a_step(model, dp).sum(0).tolist()
        mean = sum(chosen) / len(chosen)
        for expert, count in enumerate(chosen):
            bias[expert] += RATE * ((count < mean) - (count > mean))
    assert bias.abs().max() > 0
    return bias


def biases_follow_the_load(parallel: dict, stage: int, checkpoints: bool, **moe: object) -> None:
    # What is computed again is computed in float32: Float64 does not reach into a backward.
    model = tiny_models.tiny("deepseek_v3", torch.float32 if checkpoints else torch.float64)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    more = {"context_parallel": {"algorithm": "ring"}} if "context" in parallel else {}
    more |= {"pipeline": {"micro_batches": 2}} if "pipeline" in parallel else {}
    engine = engine_of(model, {"parallel": parallel, "moe": {"bias_update_rate": RATE, **moe}} | more, stage)
    expected = expected_biases(engine.topology.size("dp"))
    train(engine, STEPS)
    if engine.topology.rank("pp") != engine.topology.size("pp") - 1:
        return  # The layer is in the last stage.
    found = model.get_buffer(f"{NAME}.gate.e_score_correction_bias")
    assert torch.equal(found, expected.to(found.dtype)), (parallel, stage, found, expected)


def biases_stay_in_float32(stage: int) -> None:
    model = tiny_models.tiny("deepseek_v3", torch.float32)
    name = f"{NAME}.gate.e_score_correction_bias"
    model.get_buffer(name).copy_(torch.tensor([0.1, 0.2, 0.3, 8.0]))
    model.to(torch.bfloat16)
    model.get_buffer(name).data = torch.tensor([0.1, 0.2, 0.3, 8.0])
    engine = engine_of(model, {"parallel": {"expert": 2}, "moe": {"bias_update_rate": 1e-4}}, stage)
    train(engine, 1)
    found = model.get_buffer(name)
    assert found.dtype == torch.float32
    change = (found - torch.tensor([0.1, 0.2, 0.3, 8.0])).abs()
    assert (change[:3] - 1e-4).abs().max() <= 1e-6 and 0 < change[3] <= 2e-4, change


def loads_are_written(folder: str, parallel: dict, factor: float | None) -> None:
    model = tiny_models.tiny("mixtral", torch.float32, output_router_logits="pipeline" not in parallel).double()
    moe = {"load_report": f"{folder}/deeper/load.svg", "grouped_matmul": True}
    moe |= {} if factor is None else {"capacity_factor": factor}
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}
    more = {"pipeline": {"micro_batches": 2}} if "pipeline" in parallel else {}
    engine = engine_of(model, {"parallel": parallel, "moe": moe} | more, 1, **monitor)
    # The first layer, whose choices no dropped token changes.
    block = "model.layers.0.mlp"
    chosen = choices_of_a_step(tiny_models.tiny("mixtral", torch.float32).double(), engine.topology.size("dp"), block)
    train(engine, STEPS)
    dist.barrier()
    if dist.get_rank():
        return
    whole = chosen.sum(0)
    rows = rows_of(folder, f"Train/Experts/{block}/max_over_mean_load")
    assert rows == [float(whole.max() / whole.double().mean())] * STEPS, (rows, chosen)
    if factor is not None:
        capacity = math.ceil(factor * rule.MICRO * dense.LENGTH * 2 / 4)
        dropped = (chosen - capacity).clamp(min=0).sum().item()
        rows = rows_of(folder, f"Train/Experts/{block}/dropped_fraction")
        assert dropped and rows == [dropped / whole.sum().item()] * STEPS, (rows, chosen)
    assert f"{NAME}: the most loaded expert has" in Path(f"{folder}/deeper/load.svg").read_text()


def rows_of(folder: str, event: str) -> list[float]:
    """The values of a file of the csv monitor."""
    (file,) = Path(folder, "job").glob(f"*{event.replace('/', '_')}*")
    with file.open() as lines:
        return [float(row[1]) for row in list(csv.reader(lines))[1:]]


def refused() -> None:
    engine_of(tiny_models.tiny("qwen3_moe", torch.float32), {"moe": {"bias_update_rate": 0.1}}, 0)
