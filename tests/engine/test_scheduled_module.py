"""``pipeline.schedule`` for a ``deepspeed.PipelineModule``: the gradient rule, and DeepSpeed's own engine."""

from __future__ import annotations

from pathlib import Path

import gradient_rule as rule
import pytest
import test_pipeline as pipelines
import torch
import torch.distributed as dist
from deepspeed import init_distributed
from ranks import run_on_ranks
from torch import nn

SINGLE = 1e-6
FLOAT64, BF16 = torch.float64, torch.bfloat16
RECOMPUTED = {"schedule": "gpipe", "recompute": "inline"}
ONE_PROCESS = [
    ({"context": 2}, FLOAT64, 0, True, {"schedule": "zb_h1"}),
    ({}, FLOAT64, 1, True, {"schedule": "1f1b"}),
    ({}, BF16, 1, True, {"schedule": "zb_h2"}),
    *[
        (parallel, dtype, zero, tied, keys)
        for parallel in ({}, {"context": 2})
        for dtype in (FLOAT64, BF16)
        for zero, tied in ((0, True), (1, False))
        for keys in ({"schedule": "1f1b"}, {"schedule": "zb_h1"}, RECOMPUTED)
    ],
]


@pytest.mark.slow
@pytest.mark.matrix(corners=3, drawn=1)
@pytest.mark.parametrize(("parallel", "dtype", "zero", "tied", "keys"), ONE_PROCESS, ids=str)
def test_one_batch_is_that_of_one_process(tmp_path, parallel, dtype, zero, tied, keys):
    config = rule.config(zero, dtype, {**parallel, "pipeline": pipelines.STAGES}) | {"gradient_accumulation_steps": 3}
    config["ds_npu"]["pipeline"] = keys
    written = pipelines.written(tmp_path, config)
    run_on_ranks(4, pipelines.one_batch, dtype, parallel, zero, tied, written, deadline_s=300.0)


class Pair(nn.Module):
    """Between stages: hidden states, and word numbers that have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding, self.linear = nn.Embedding(rule.V, rule.H), nn.Linear(rule.H, rule.H)

    def forward(self, given):
        words, hidden = given if isinstance(given, tuple) else (given, 0.0)
        return words, self.linear(hidden + self.embedding(words)).relu_()


class End(Pair):
    def forward(self, given):
        return super().forward(given)[1] @ self.embedding.weight.t()


def engine_of(config: dict, keys: dict):
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    section = {"parallel": {"pipeline": 2}, "pipeline": keys}
    layers = [LayerSpec(Pair), LayerSpec(Pair), LayerSpec(Pair), LayerSpec(End)]
    module = PipelineModule(layers, num_stages=2, loss_fn=rule.token_loss, partition_method="uniform")
    weights = [each for each in module.parameters() if each.requires_grad]
    return deepspeed.initialize(model=module, model_parameters=weights, config=config | {"ds_npu": section})[0]


def batches(engine, length: int, seed: int):
    generator = torch.Generator().manual_seed(seed + engine.topology.rank("dp"))
    for _ in range(engine.micro_batches):
        tokens = torch.randint(0, rule.V, (rule.MICRO, length + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def compare(cases: list[tuple[dict, dict]], folder: str) -> None:
    """Several steps, evaluations between them, a checkpoint that the other engine goes on from."""
    rule.without_extension()
    init_distributed("gloo")
    for index, (keys, changes) in enumerate(cases):
        config = rule.config(1, torch.float32, {}) | {"gradient_accumulation_steps": 4} | changes
        both = engine_of(config, {}), engine_of(config, keys)
        exact = 0.0 if keys["schedule"] in ("gpipe", "1f1b") else SINGLE
        for step, length in enumerate((8, 8, 5)):
            for engine in both if length == 5 else ():
                engine.reset_activation_shape()
            theirs, ours = (float(engine.train_batch(batches(engine, length, step))) for engine in both)
            assert abs(ours / theirs - 1) <= exact, (keys, step, ours, theirs)
            theirs, ours = (float(engine.eval_batch(batches(engine, length, 9))) for engine in both)
            assert abs(ours / theirs - 1) <= exact, (keys, step, ours, theirs)
        norms = [float(engine.get_global_grad_norm()) for engine in both]
        assert abs(norms[1] / norms[0] - 1) <= exact
        for which, engine in zip(("theirs", "ours"), both, strict=True):
            engine.save_checkpoint(f"{folder}/{index}/{which}", tag="last")
        dist.barrier()
        names = [
            sorted(each.name for each in Path(folder, f"{index}", which, "last").glob("layer_*"))
            for which in ("theirs", "ours")
        ]
        assert names[0] == names[1] and len(names[0]) == 4
        losses = []
        for which in ("theirs", "ours"):
            engine = engine_of(config, {"schedule": "zb_h1"} if which == "theirs" else {})
            engine.load_checkpoint(f"{folder}/{index}/{which}")
            losses.append(float(engine.train_batch(batches(engine, 8, 7))))
        assert abs(losses[1] / losses[0] - 1) <= SINGLE


CHECKPOINTED = {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}}
SAME = [
    ({"schedule": "1f1b"}, {}),
    ({"schedule": "zb_h1"}, {"zero_optimization": {"stage": 0}}),
    ({"schedule": "1f1b", "recompute": "bubble"}, {}),
    ({"schedule": "zb_h2"}, CHECKPOINTED),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SAME, ids=str)
def test_steps_are_those_of_deepspeeds_engine(case, tmp_path):
    run_on_ranks(2, compare, [case], str(tmp_path), deadline_s=300.0)


class Single(Pair):
    def forward(self, given):
        return (super().forward(given)[1],)


def refused() -> None:
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

    rule.without_extension()
    init_distributed("gloo")
    config = rule.config(1, torch.float32, {})

    def initialize(keys: dict, kind=PipelineModule, **options):
        module = kind(rule.layers(), num_stages=2, loss_fn=rule.token_loss, **options)
        section = {"parallel": {"pipeline": 2}, "pipeline": keys}
        deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config | {"ds_npu": section})

    for keys, said in (
        ({"schedule": "zb_v"}, r"pipeline\.schedule zb_v: found for a deepspeed\.PipelineModule, which has one stage"),
        ({"split": [1, 3]}, r"pipeline\.split \[1, 3\]: found for a deepspeed\.PipelineModule"),
    ):
        with pytest.raises(ValueError, match=said):
            initialize(keys)
    with pytest.raises(ValueError, match="a PipelineModule with dynamic_shape or get_additional_losses"):
        initialize({"schedule": "1f1b"}, dynamic_shape=True)
    config["gradient_accumulation_steps"] = 4
    with pytest.raises(ValueError, match="for a DualPipeVModule, which has a schedule of its own"):
        initialize({"schedule": "1f1b"}, DualPipeVModule)


def test_what_a_module_cannot_follow_is_refused():
    run_on_ranks(2, refused)
