"""Hugging Face models in stages, each rank an engine, run by a schedule, against one process in float64."""

from __future__ import annotations

from collections.abc import Sequence

import gradient_rule as rule
import tensor_parallel_rule as dense
import torch
import torch.distributed as dist
from staged_models import stageable
from tiny_models import Float64, tokens
from torch import nn

from ds_npu.features.pipeline.stages import cut_into_stages, run_stage, stages_of
from ds_npu.models.globs import plan_for
from ds_npu.parallel.pipeline.executor import PipelineRun
from ds_npu.parallel.pipeline.pass_through import Stage, stages_in
from ds_npu.parallel.pipeline.schedules import SCHEDULES
from ds_npu.parallel.pipeline.transfers import PipelineLinks, Tensors
from ds_npu.zero_ext.held_reduction import HeldReduction

EXACT, SINGLE = dense.EXACT, dense.SINGLE
LENGTHS = (7, 4, 9, 5)
"""Of the micro-batches: shapes and numbers of labels differ."""


def batches() -> list[dict[str, torch.Tensor]]:
    found = [tokens(2, length) + (index > 1) for index, length in enumerate(LENGTHS)]
    return [{"input_ids": each, "labels": each} for each in found]


def share(index: int) -> float:
    """Of a micro-batch's mean in the mean over all labels; the first token of a sample is no label."""
    return (LENGTHS[index] - 1) / sum(length - 1 for length in LENGTHS)


class EngineStage:
    """One stage of an engine's model."""

    def __init__(self, model: nn.Module, stage: Stage, held: HeldReduction) -> None:
        self.model, self.stage, self.held = model, stage, held

    def forward(self, micro_batch: int, arrived: Tensors | None) -> Tensors:
        out = run_stage(self.model, self.stage, arrived, **batches()[micro_batch])
        return (out.loss * share(micro_batch),) if self.stage.index == self.stage.count - 1 else out

    def backward(self, outputs: Tensors, gradients: Tensors | None):
        return self.held.backward(outputs, gradients)


def engine_of(model: nn.Module, zero: int, ranks: int):
    import deepspeed

    rule.without_extension()
    config = dense.config(zero, torch.float64, {"parallel": {"pipeline": ranks}}) | {"gradient_accumulation_steps": 1}
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def step(name: str, family: str, zero: int) -> None:
    plain = stageable(family)
    total = 0.0
    with Float64():
        for index, batch in enumerate(batches()):
            loss = plain(**batch).loss * share(index)
            loss.backward()
            total += loss.item()
    ranks, index = dist.get_world_size(), dist.get_rank()
    model = stageable(family)
    plan = plan_for(model, {})
    cut_into_stages(model, plan, stages_of(plan, ranks)[index])
    engine = engine_of(model, zero, ranks)
    schedule = SCHEDULES[name].make(ranks, len(LENGTHS), 1)
    links = PipelineLinks((dist.new_group(), dist.new_group()), torch.device("cpu"))
    with HeldReduction(engine, queue_weight_gradients=True) as held, Float64():
        done = PipelineRun(schedule, index, {index: EngineStage(model, stages_in(model)[0], held)}, links)
        done.run(LENGTHS)
    gradients = rule.reduced_gradients(engine, model)
    engine.step()
    where = (name, family, zero)
    if index == ranks - 1:
        assert abs(sum(map(float, done.losses.values())) / total - 1) <= EXACT, where
    trained = {key: weight.grad for key, weight in plain.named_parameters()}
    assert rule.relative(gradients, {key: trained[key] for key in gradients}) <= EXACT, where
    norm = torch.cat([each.flatten() for each in trained.values()]).norm().item()
    assert abs(float(engine.get_global_grad_norm()) / norm - 1) <= (EXACT if zero == 0 else SINGLE), where
    scale = min(1.0, rule.CLIP / (norm + 1e-6))
    weights = {key: each.detach() - rule.LR * scale * each.grad for key, each in plain.named_parameters()}
    whole = dense.shared(engine.whole_state_dict())
    found = {key: whole[key].double() for key in weights}
    assert rule.relative(found, weights) <= (EXACT if zero == 0 else SINGLE), where


def steps(cases: Sequence[tuple[str, str, int]]) -> None:
    for case in cases:
        step(*case)
