"""The gradient rule for PipelineEngine and DualPipeVEngine: stages x data x context, ZeRO 0 and 1."""

from __future__ import annotations

import json
from pathlib import Path

import gradient_rule as rule
import pytest
import torch
from ranks import run_on_ranks
from torch import nn

STAGES = 2
DUALPIPE = 2 * STAGES
"""The micro-batches that DualPipeV needs at least; here also what asks for it."""
TIES = "embedding"
EXACT, SINGLE = 1e-12, 1e-6


def logits_of(embedding: nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ embedding.weight.t()


def specs(tied: bool) -> list[object]:
    """The layers of ``whole``, as a pipeline's; the tied weight is on the first stage and on the last."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    if not tied:
        return rule.layers()
    return [
        TiedLayerSpec(TIES, nn.Embedding, rule.V, rule.H),
        LayerSpec(nn.Linear, rule.H, rule.H),
        LayerSpec(nn.LayerNorm, rule.H),
        TiedLayerSpec(TIES, nn.Embedding, rule.V, rule.H, forward_fn=logits_of),
    ]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear, self.norm, _ = rule.layers()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return logits_of(self.embedding, self.norm(self.linear(self.embedding(tokens))))


def whole(tied: bool) -> nn.Module:
    return Tied() if tied else nn.Sequential(*rule.layers())


def same_start(pipeline: nn.Module, start: nn.Module) -> None:
    """Copy the weights of ``start`` into the stages, which name them otherwise."""
    for name, weight in pipeline.named_parameters():
        weight.data.copy_(dict(start.named_parameters())[in_whole(name)])


def in_whole(name: str) -> str:
    """The name, in ``whole``, of a stage's weight: layer numbers alike, or the tied model's attributes."""
    layer, _, weight = name.removeprefix("tied_modules.").partition(".")
    return f"{ATTRIBUTES.get(layer, layer)}.{weight}"


ATTRIBUTES: dict[str, str] = {}


def one_batch(dtype: torch.dtype, parallel: dict[str, int], stage: int, tied: bool, config_path: str) -> None:
    import os

    import deepspeed
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

    rule.without_extension()
    config = json.loads(Path(config_path).read_text())
    rule.ACCUMULATION = config["gradient_accumulation_steps"]
    kind = DualPipeVModule if rule.ACCUMULATION == DUALPIPE else PipelineModule
    ATTRIBUTES.clear()
    ATTRIBUTES.update({TIES: "embedding", "1": "linear", "2": "norm"} if tied else {})
    os.environ["DS_NPU_CONFIG"] = config_path
    deepspeed.init_distributed("gloo")
    pipeline = kind(specs(tied), num_stages=STAGES, loss_fn=rule.token_loss, partition_method="uniform")
    same_start(pipeline, whole(tied))
    pipeline.to(dtype)
    engine, *_ = deepspeed.initialize(model=pipeline, model_parameters=pipeline.parameters(), config=config)
    topology = engine.topology
    count = rule.MICRO * rule.ACCUMULATION * topology.size("dp")
    assert engine.train_batch_size() == count
    loss = float(engine.train_batch(iter(rule.my_batches(topology))))
    expected = rule.reference(count, whole(tied).to(dtype))
    found = {in_whole(name): weight.detach().double() for name, weight in pipeline.named_parameters()}
    error = rule.relative(found, {name: expected.weights[name] for name in found})
    norm_error = abs(float(engine.get_global_grad_norm()) / expected.norm - 1)
    where = f"stage {stage}, {dtype}, {parallel}, tied {tied}"
    assert abs(loss / expected.loss - 1) <= (4e-3 if dtype == torch.bfloat16 else SINGLE), (where, loss, expected.loss)
    if dtype == torch.bfloat16:
        # One rounding of a bfloat16 weight is 2**-9 of it; a step moves weights by about as much as they are.
        assert error <= 2**-8 and norm_error <= 2**-7, (where, error, norm_error)
    else:
        tight = EXACT if dtype == torch.float64 and stage == 0 else SINGLE
        assert error <= tight and norm_error <= tight, (where, error, norm_error)


def written(tmp_path, config: dict[str, object]) -> str:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    return str(path)


def cases():
    for name, parallel in (("dp2", {}), ("cp2", {"context": 2})):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            for stage, tied in ((0, False), (0, True), (1, False), (1, True)):
                quick = name == "cp2" and dtype == torch.float64 and tied
                title = f"{name} {dtype} ZeRO {stage} {'tied' if tied else 'untied'}"
                marks = () if quick else pytest.mark.slow
                yield pytest.param(parallel, dtype, stage, tied, id=title, marks=marks)


@pytest.mark.matrix(corners=3, drawn=2)
@pytest.mark.parametrize(("parallel", "dtype", "stage", "tied"), list(cases()))
def test_one_batch_is_that_of_one_process(tmp_path, parallel, dtype, stage, tied):
    config = rule.config(stage, dtype, {**parallel, "pipeline": STAGES})
    run_on_ranks(4, one_batch, dtype, parallel, stage, tied, written(tmp_path, config))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("parallel", [{}, {"context": 2}], ids=["dp2", "cp2"])
def test_dualpipev(tmp_path, parallel, stage, tied):
    config = rule.config(stage, torch.float32, {**parallel, "pipeline": STAGES})
    config["gradient_accumulation_steps"] = DUALPIPE
    run_on_ranks(4, one_batch, torch.float32, parallel, stage, tied, written(tmp_path, config))


def disagreeing(config_path: str) -> None:
    import os

    import deepspeed
    from deepspeed.pipe import PipelineModule

    from ds_npu.config.problems import ConfigError

    rule.without_extension()
    os.environ["DS_NPU_CONFIG"] = config_path
    deepspeed.init_distributed("gloo")
    with pytest.raises(ConfigError, match=r"ds_npu\.parallel\.pipeline: found 1; 2, the stages"):
        PipelineModule(rule.layers(), num_stages=2, loss_fn=rule.token_loss)


def test_stages_that_are_not_the_sections(tmp_path):
    run_on_ranks(2, disagreeing, written(tmp_path, rule.config(0, torch.float32, {"pipeline": 1})))


def unannounced() -> None:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    rule.without_extension()
    deepspeed.init_distributed("gloo")
    pipeline = PipelineModule(rule.layers(), num_stages=2, loss_fn=rule.token_loss)
    config = rule.config(0, torch.float32, {"pipeline": 2, "context": 2})
    with pytest.raises(RuntimeError, match="DS_NPU_CONFIG"):
        deepspeed.initialize(model=pipeline, config=config)


def test_a_config_that_the_pipeline_could_not_know():
    """PipelineModule makes its groups before it has seen a config, so the config must be announced."""
    run_on_ranks(4, unannounced)


def loss_of_every_stage(config: dict[str, object]) -> None:
    """Of a pipeline whose config is a dict, so that its grid was made before ds_npu could see it."""
    import os

    import deepspeed
    import torch.distributed as dist
    from deepspeed.pipe import PipelineModule

    rule.without_extension()
    os.environ.pop("DS_NPU_CONFIG", None)
    deepspeed.init_distributed("gloo")
    pipeline = PipelineModule(specs(tied=False), num_stages=STAGES, loss_fn=rule.token_loss)
    engine, *_ = deepspeed.initialize(model=pipeline, model_parameters=pipeline.parameters(), config=config)
    losses = [None] * STAGES
    dist.all_gather_object(losses, float(engine.train_batch(iter(rule.my_batches(engine.topology)))))
    assert len(set(losses)) == 1


def test_the_last_stages_loss_reaches_the_first_without_an_announced_config():
    run_on_ranks(STAGES, loss_of_every_stage, rule.config(1, torch.float32, {"pipeline": STAGES}))
