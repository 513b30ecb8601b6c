"""Weight gradients added to DeepSpeed's buffers in a pipeline, where a linear is tied between two stages."""

from __future__ import annotations

import json
import os
from typing import Any

import deepspeed
import gradient_rule as rule
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from gradient_buffer import Case
from ranks import run_on_ranks
from torch import nn

from ds_npu.zero_ext.gradient_buffer import install_gradient_buffers

pytestmark = pytest.mark.slow

NAMES = {"tied_modules.tied": "tied", "0": "embedding", "3": "head"}
SINGLE = 1e-6
ROADS = {
    "no ZeRO": Case(0, torch.float32),
    "ZeRO 1": Case(1, torch.float32),
    "BF16_Optimizer": Case(1, torch.bfloat16, "fp32"),
    "BF16_Optimizer, bf16 gradients": Case(0, torch.bfloat16),
}


class Whole(nn.Module):
    """The layers of both stages, in one process."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.embedding, self.tied = nn.Embedding(rule.V, rule.H), nn.Linear(rule.H, rule.H, bias=False)
        self.head = nn.Linear(rule.H, rule.V)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.tied(self.tied(self.embedding(tokens))))


def in_whole(name: str) -> str:
    layer, _, weight = name.rpartition(".")
    return f"{NAMES[layer]}.{weight}"


def train(case: Case, direct: bool, config: dict[str, Any]) -> tuple[float, float]:
    """How far the norm and this stage's weights are from those of one process in float64, after a step."""
    tied = TiedLayerSpec("tied", nn.Linear, rule.H, rule.H, bias=False)
    layers = [LayerSpec(nn.Embedding, rule.V, rule.H), tied, tied, LayerSpec(nn.Linear, rule.H, rule.V)]
    pipeline = PipelineModule(layers, num_stages=2, loss_fn=rule.token_loss, partition_method="uniform")
    start = Whole().to(case.dtype)
    pipeline.to(case.dtype)
    for name, weight in pipeline.named_parameters():
        weight.data.copy_(start.get_parameter(in_whole(name)))
    engine, *_ = deepspeed.initialize(model=pipeline, model_parameters=pipeline.parameters(), config=config)
    if direct:
        assert install_gradient_buffers(engine) == []
    engine.train_batch(iter(rule.my_batches(engine.topology)))
    expected = rule.reference(rule.MICRO * rule.ACCUMULATION, start)
    found = {in_whole(name): weight.detach().double() for name, weight in pipeline.named_parameters()}
    error = rule.relative(found, {name: expected.weights[name] for name in found})
    return abs(float(engine.get_global_grad_norm()) / expected.norm - 1), error


def trains_as_one_process(case: Case, config: dict[str, Any], path: str) -> None:
    rule.without_extension()
    os.environ["DS_NPU_CONFIG"] = path
    deepspeed.init_distributed("gloo")
    ordinary, direct = train(case, False, config), train(case, True, config)
    for mine, other in zip(direct, ordinary, strict=True):
        assert mine <= max(SINGLE, 2 * other * (case.dtype == torch.bfloat16)), (case, direct, ordinary)


@pytest.mark.parametrize("road", ROADS)
def test_a_pipeline_trains_as_one_process(road, tmp_path):
    config = {**ROADS[road].config(), "ds_npu": {"parallel": {"pipeline": 2}}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    run_on_ranks(2, trains_as_one_process, ROADS[road], config, str(path), deadline_s=60)
