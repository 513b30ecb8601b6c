"""ZeRO 3 that gathers by a plan, against DeepSpeed's own gathers to the bit; and how many messages that takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import deepspeed
import pytest
import tiny_models
import torch
import torch.distributed as dist
from bucketed_lives import PLAIN, WIDTH, Life, batch
from gathered_lives import LIVES, SMALL, ZERO, gathers_of, steps
from ranks import run_on_ranks
from torch import nn
from wire import Wire

from ds_npu.zero_ext.weight_gathers import GATHERS, WeightGathers

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def compare(names: list[str]) -> None:
    """On two ranks, whose sums have one order."""
    for name in names:
        life = replace(LIVES[name], stage=3)
        plain = life.engine(SMALL | PLAIN)
        assert not isinstance(gathers_of(plain), WeightGathers)
        expected = life.live(plain)
        assert len(expected) > 10
        for kind, zero in ZERO.items():
            engine = life.engine(zero)
            assert isinstance(gathers_of(engine), WeightGathers)
            found = life.live(engine)
            assert len(found) == len(expected)
            for index, (each, other) in enumerate(zip(found, expected, strict=True)):
                assert torch.equal(each.nan_to_num(), other.nan_to_num()), (name, kind, index, each, other)


@pytest.mark.parametrize("part", range(5))
def test_a_life_is_deepspeeds_to_the_bit(part):
    run_on_ranks(2, compare, list(LIVES)[part::5])


def gathers_of_a_step(zero: dict[str, Any], keep: int = 0, accumulation: int = 4, layers: int = 24) -> list[int]:
    """The gathers of each micro-batch of the fourth step, the last one's with those of the step.

    ``keep``: bytes of weights that are to stay gathered.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    engine = Life(steps, stage=3, accumulation=accumulation).engine_of(model, zero)
    counts = []
    for step in range(4):
        counts = []
        for micro in range(accumulation):
            with Wire() as wire:
                engine.backward(engine(batch(engine, step, micro)).square().mean())
                engine.step()
            counts.append(sum("allgather" in name for name, _ in wire.sent))
        if keep and step == 2:
            GATHERS.get(engine.optimizer).keep(keep)
    return counts


def count_gathers() -> None:
    # Four layers a message. Nine stay for the backward, the others are gathered twice.
    message = {"stage3_prefetch_bucket_size": 4 * WIDTH * WIDTH}
    assert gathers_of_a_step(SMALL | message)[:3] == [10, 10, 10]
    plain = gathers_of_a_step(SMALL | PLAIN | {"stage3_prefetch_bucket_size": WIDTH})
    assert plain[:3] == [47, 47, 47] and plain[3] >= 47 + 24, plain
    # The biases are gathered together behind the step.
    assert gathers_of_a_step(SMALL | message)[3] == 11
    assert gathers_of_a_step(SMALL | message | {"stage3_max_reuse_distance": 10**9}) == [6, 0, 0, 1]
    assert gathers_of_a_step(SMALL | message, keep=10**9) == [6, 0, 0, 1]
    # The first twelve layers, of 600 bytes and 24 of padding, stay; of the others layers 15 to 23 for the backward.
    assert gathers_of_a_step(SMALL | message, keep=12 * 4 * WIDTH * WIDTH) == [7, 4, 4, 5]


def test_a_step_takes_few_gathers():
    run_on_ranks(2, count_gathers)


def modules_alone() -> None:
    """A script that runs modules by themselves, or evaluates, between micro-batches does not end the plan."""
    other = Life(steps, stage=3, accumulation=1).engine(SMALL)
    steps(other, 2)
    engine = Life(steps, stage=3, accumulation=1).engine(SMALL)
    plans = []
    for step in range(4):
        with torch.no_grad():
            engine.module.first(batch(engine, step, 3))
            engine(batch(engine, step, 2))
            engine.module.layers[1](batch(engine, step, 1))
        steps(engine, 1, first=step)
        plans.append(gathers_of(engine)._plan)
    # The first evaluation is planned, and then the first micro-batch, which begins like it.
    assert plans[1] is plans[2] is plans[3], plans
    assert len(plans[3].messages) == len(gathers_of(other)._plan.messages)
    assert len(gathers_of(engine)._order) == len(gathers_of(other)._order)


def test_modules_that_run_alone_leave_the_plan():
    run_on_ranks(2, modules_alone)


def second_engines() -> None:
    """Another engine of a model whose first engine is still there, whose hooks its modules keep."""
    life, small = Life(steps, stage=3), ZERO["small messages"]
    expected = None
    pairs = [(PLAIN, PLAIN), *((zero, zero) for zero in ZERO.values()), (PLAIN, small), (small, PLAIN)]
    for zero, other in pairs:
        first = life.engine(SMALL | zero)
        numbers = steps(first)
        numbers += steps(life.engine_of(first.module, SMALL | other), first=3)
        expected = numbers if expected is None else expected
        for index, (found, right) in enumerate(zip(numbers, expected, strict=True)):
            assert torch.equal(found, right), (zero, other, index)


def test_a_second_engine_of_a_model():
    run_on_ranks(2, second_engines)


def whole_experts() -> None:
    """Experts of which each rank has its own are computed with as their shards: nothing is sent or copied."""
    torch.manual_seed(0)
    section = {"parallel": {"expert": 2}}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": SGD, "zero_optimization": zero, "ds_npu": section}
    config |= {"zero_allow_untested_optimizer": True}
    model = tiny_models.tiny("qwen3_moe", torch.float32)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    experts = [weight for weight in model.parameters() if dist.get_world_size(weight.ds_process_group) == 1]
    others = [weight for weight in model.parameters() if dist.get_world_size(weight.ds_process_group) == 2]
    assert len(experts) >= 2 and len(others) >= 10
    computed, numbers = set[int](), {weight.ds_id for weight in experts}

    def look(module: nn.Module, *_: object) -> None:
        for weight in module.parameters(recurse=False):
            if weight.ds_id in numbers:
                with torch._C.DisableTorchFunctionSubclass():
                    assert weight.data_ptr() == weight.ds_tensor.data_ptr() and weight.shape == weight.ds_shape
                computed.add(weight.ds_id)

    for module in model.modules():
        module.register_forward_pre_hook(look)
    for _ in range(3):
        with Wire() as wire:
            ids = torch.arange(16).view(2, 8)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    assert computed == numbers
    # Its half of each, and at most once forward and once backward.
    leaving = sum(size for (kind, _), size in wire.leaving.items() if kind == "gather")
    assert 0 < leaving <= 2 * sum(weight.ds_tensor.nbytes for weight in others)


def test_experts_that_are_whole_on_their_ranks_are_their_shards():
    run_on_ranks(2, whole_experts)


class Pieces(nn.Module):
    """An activation of two rows; called, where ``unequal``, for both or for each, by the rank and the micro-batch."""

    def __init__(self, unequal: bool) -> None:
        super().__init__()
        self.activation, self.unequal, self.rows = nn.Tanh(), unequal, 1 + dist.get_rank()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = 3 - self.rows if self.unequal else 2
        return torch.cat([self.activation(each) for each in x.split(self.rows)])


def unequal_activations() -> None:
    """Experts call their activation as often as experts have tokens; no weights are gathered for it."""
    numbers = []
    # DeepSpeed's own gathers fail with an assertion where calls are unequal.
    for zero, unequal in ((SMALL | PLAIN, False), (SMALL, True)):
        torch.manual_seed(0)
        model = nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(WIDTH, WIDTH), Pieces(unequal))))
        engine = Life(steps, stage=3, accumulation=3).engine_of(model, zero)
        numbers.append(steps(engine, 3, forward=lambda engine, x, step: engine(x).square().mean()))
    assert all(map(torch.equal, *numbers))
    assert gathers_of(engine)._plan is not None and gathers_of(engine)._follows


def test_ranks_may_call_activations_unequally_often():
    run_on_ranks(2, unequal_activations)


def different_modules() -> None:
    """Ranks that run modules of one size in another order would compute with each other's weights."""
    engine = Life(steps, stage=3, accumulation=1).engine({"stage3_param_persistence_threshold": 0})
    layers = engine.module.layers
    if dist.get_rank() == 1:
        engine.module.layers = nn.ModuleList(reversed(layers))
    with pytest.raises(RuntimeError, match="rank 1 ran other modules than rank 0 in a micro-batch"):
        steps(engine, 2)


def test_ranks_that_run_other_modules_are_told():
    run_on_ranks(2, different_modules)
