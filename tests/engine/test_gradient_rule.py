"""The gradient rule for DeepSpeedEngine: ZeRO 0-3, float64, fp32 and bf16, over every axis of layers that are whole."""

from __future__ import annotations

import gradient_rule as rule
import pytest
import tiny_models
import torch
from ranks import run_on_ranks
from torch import nn

WORLDS = {
    "dp2": (2, {}),
    "cp2": (2, {"context": 2}),
    "tp2": (2, {"tensor": 2}),
    "dp2 x cp2": (4, {"context": 2}),
    "cp2 x tp2": (4, {"context": 2, "tensor": 2}),
}
EXACT = 1e-12
SINGLE = 1e-6
"""A few float32 roundings, of relative size 6e-8, of gradients that are sums of tens of terms."""


def one_step(stage: int, dtype: torch.dtype, parallel: dict[str, int], **zero) -> None:
    """Run a step on this world and hold losses, gradients, norm and updated weights to the reference."""
    import deepspeed

    rule.without_extension()
    model = nn.Sequential(*rule.layers()).to(torch.float64).to(dtype)
    config = rule.config(stage, dtype, parallel, **zero)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    topology = engine.topology
    count = rule.MICRO * rule.ACCUMULATION * topology.size("dp")
    start = nn.Sequential(*rule.layers()).to(dtype)
    expected = rule.reference(count, start)
    share = 0.0
    for index, (inputs, labels) in enumerate(rule.my_batches(topology)):
        loss = rule.token_loss(engine(inputs), labels)
        share += loss.item() / rule.ACCUMULATION
        engine.backward(loss)
        if index == rule.ACCUMULATION - 1:
            gradients = rule.reduced_gradients(engine, model)
        engine.step()
    loss_error = abs(rule.mean_loss(share, topology) / expected.loss - 1)
    gradient_error = rule.relative(gradients, expected.gradients)
    norm_error = abs(float(engine.get_global_grad_norm()) / expected.norm - 1)
    weight_error = rule.relative(rule.whole_weights(model), expected.weights)
    where = f"stage {stage}, {dtype}, {parallel}, {zero}"
    if dtype == torch.bfloat16:
        single = rule.reference(count, nn.Sequential(*rule.layers()).to(dtype), compute=torch.bfloat16)
        bound = 2 * rule.relative(single.gradients, expected.gradients)
        assert gradient_error <= bound, (where, gradient_error, bound)
        assert loss_error <= 4e-3 and norm_error <= bound, (where, loss_error, norm_error)
        return
    tight = EXACT if dtype == torch.float64 else SINGLE
    assert loss_error <= tight and gradient_error <= tight, (where, loss_error, gradient_error)
    # ZeRO keeps its masters, and most of its norms, in float32, whatever the model.
    assert norm_error <= (tight if stage == 0 else SINGLE), (where, norm_error)
    assert weight_error <= (tight if stage == 0 else SINGLE), (where, weight_error)


def all_stages(dtype: torch.dtype, parallel: dict[str, int]) -> None:
    for stage in (0, 1, 2, 3):
        one_step(stage, dtype, parallel)


def cases():
    for world, (size, _) in WORLDS.items():
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            quick = dtype == torch.float64 and size == 2
            yield pytest.param(world, dtype, id=f"{world} {dtype}", marks=() if quick else pytest.mark.slow)


@pytest.mark.matrix(corners=3, drawn=2)
@pytest.mark.parametrize(("world", "dtype"), list(cases()))
def test_one_step_is_that_of_one_process(world, dtype):
    run_on_ranks(WORLDS[world][0], all_stages, dtype, WORLDS[world][1])


OPTIONS = (
    (1, {"overlap_comm": True}),
    (1, {"reduce_scatter": False}),
    (2, {"overlap_comm": True, "contiguous_gradients": False}),
    (2, {"use_multi_rank_bucket_allreduce": False}),
    (2, {"round_robin_gradients": True}),
    (3, {"overlap_comm": True}),
    (3, {"reduce_scatter": False}),
    (3, {"stage3_param_persistence_threshold": 0, "sub_group_size": 64}),
)
"""Every other road by which DeepSpeed reduces gradients."""


def all_options() -> None:
    for stage, options in OPTIONS:
        step_of_weights(stage, {"context": 2}, options)


def step_of_weights(stage: int, parallel: dict[str, int], options: dict[str, object]) -> None:
    """Hold the clipped update, and the norm, to the reference: they show every gradient, wherever it is kept."""
    import deepspeed

    rule.without_extension()
    model = nn.Sequential(*rule.layers())
    config = rule.config(stage, torch.float32, parallel, **options)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for inputs, labels in rule.my_batches(engine.topology):
        engine.backward(rule.token_loss(engine(inputs), labels))
        engine.step()
    count = rule.MICRO * rule.ACCUMULATION * engine.topology.size("dp")
    expected = rule.reference(count, nn.Sequential(*rule.layers()))
    where = f"stage {stage}, {options}"
    assert abs(float(engine.get_global_grad_norm()) / expected.norm - 1) <= SINGLE, where
    assert rule.relative(rule.whole_weights(model), expected.weights) <= SINGLE, where


@pytest.mark.slow
def test_every_road_of_reduction():
    run_on_ranks(4, all_options)


def built_under_zero_init(parallel: dict[str, int]) -> None:
    """zero.Init shards over dp x cp, and peers of one shard hold the same weights whatever their seeds were."""
    import deepspeed
    import torch.distributed as dist

    rule.without_extension()
    config = rule.config(3, torch.float32, parallel)
    with deepspeed.zero.Init(config_dict_or_path=config):
        parts = rule.layers()
        torch.manual_seed(100 + dist.get_rank())
        model = nn.Sequential(*parts, nn.Linear(rule.V, rule.V))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    topology = engine.topology
    assert all(weight.ds_process_group is topology.group("dp", "cp") for weight in model.parameters())
    weights = rule.whole_weights(model)
    start = nn.Sequential(*rule.layers(), nn.Linear(rule.V, rule.V))
    start.load_state_dict({name: weight.float() for name, weight in weights.items()})
    for weight in weights.values():
        first = weight.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, weight)
    for inputs, labels in rule.my_batches(topology):
        engine.backward(rule.token_loss(engine(inputs), labels))
        engine.step()
    expected = rule.reference(rule.MICRO * rule.ACCUMULATION * topology.size("dp"), start)
    assert abs(float(engine.get_global_grad_norm()) / expected.norm - 1) <= SINGLE
    assert rule.relative(rule.whole_weights(model), expected.weights) <= SINGLE


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"context": 2}, {"tensor": 2}, {"context": 2, "tensor": 2}], ids=str)
def test_a_model_built_under_zero_init(parallel):
    run_on_ranks(4, built_under_zero_init, parallel)


def different_seeds(stage: int, parallel: dict[str, int]) -> None:
    import deepspeed
    import torch.distributed as dist

    rule.without_extension()
    model = tiny_models.tiny("llama", torch.float32)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    config = rule.config(stage, torch.float32, parallel)
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    mine = {name: weight.cpu() for name, weight in rule.whole_weights(model).items()}
    every = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    # Pipeline stages have weights of their own.
    alike = [name for other in every for name in mine.keys() & other.keys() if torch.equal(mine[name], other[name])]
    assert len(mine) >= 10 and len(alike) >= 2 * len(mine), parallel
    assert all(torch.equal(mine[name], other[name]) for other in every for name in mine.keys() & other.keys())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "parallel"), [(0, {"tensor": 2}), (3, {"tensor": 2}), (0, {"pipeline": 2}), (2, {"pipeline": 2})], ids=str
)
def test_replicas_start_alike_whatever_their_seeds(stage, parallel):
    run_on_ranks(4, different_seeds, stage, parallel)
