"""The trial of optimizers: it tells those that step each element by itself from those that read whole weights."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from whole_weight_optimizers import Blocks, Chosen, Lamb, LargeLamb, Prodigy, Trains

from ds_npu.parallel.runtime.placement import Placement, set_placement
from ds_npu.parallel.tensor.sharding import Sharding
from ds_npu.zero_ext.optimizer_trial import APART, FLAT, NotRepeatableError, Verdict, difference_in_parts, tried

BY_ELEMENT = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        super().step()
        for group in self.param_groups:
            for weight in group["params"]:
                weight.add_(torch.randn_like(weight))


class Named(torch.optim.SGD):
    """What it was given cannot be read from it."""

    def __init__(self, params, secret):
        super().__init__(params, lr=secret)


def weights(shape: tuple[int, ...] = (4, 6), count: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for _ in range(count)]


def settings(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_optimizers_that_step_each_element_by_itself(name):
    optimizer = getattr(torch.optim, name)(weights(), lr=0.01)
    for dims, dim in ((1, 0), (2, 0), (2, 1), (3, 1), (2, APART), (2, FLAT)):
        assert difference_in_parts(optimizer, settings(optimizer), dims, dim) == 0, (dims, dim)


@pytest.mark.parametrize(
    "make",
    [
        Lamb,
        torch.optim.Muon,
        torch.optim.Adafactor,
        lambda held: transformers.Adafactor(held, lr=1e-3, relative_step=False, scale_parameter=False),
    ],
)
def test_optimizers_that_read_whole_weights(make):
    optimizer = make(weights())
    assert difference_in_parts(optimizer, settings(optimizer), 2, 0) > 0.05
    assert difference_in_parts(optimizer, settings(optimizer), 2, 1) > 0.05
    assert difference_in_parts(optimizer, settings(optimizer), 2, APART) == 0


def test_an_optimizer_that_reads_all_weights_of_its_rank():
    optimizer = Prodigy(weights())
    assert difference_in_parts(optimizer, settings(optimizer), 2, APART) > 0.05


def test_a_learning_rate_of_zero_when_a_scheduler_warms_up():
    for make, differs in ((torch.optim.AdamW, False), (torch.optim.SGD, False), (Lamb, True)):
        optimizer = make(weights(), lr=0.01)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        assert optimizer.param_groups[0]["lr"] == 0
        assert (difference_in_parts(optimizer, settings(optimizer), 2, 0) > 0.05) is differs
        assert optimizer.param_groups[0]["lr"] == 0


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda held: Named(held, 0.1), "secret is not known"),
        (lambda held: Noisy(held, 0.1), "gave different results"),
        (torch.optim.LBFGS, "closure"),
    ],
)
def test_what_cannot_be_repeated(make, why):
    with pytest.raises(NotRepeatableError, match=why):
        difference_in_parts(make(weights()), {}, 2, 0)


def test_an_optimizer_that_reads_whole_weights_only_where_they_are_large():
    optimizer = LargeLamb(weights())
    for dim in (0, 1):
        assert difference_in_parts(optimizer, settings(optimizer), 2, dim) > 0.05, dim
    assert difference_in_parts(optimizer, settings(optimizer), 1, 0) == 0


def test_blocks_of_8_bits_only_in_large_weights():
    """What the constructor was given is read from an attribute, too, where its default differs."""
    optimizer = Blocks(weights(), least=4096)
    for dims, dim in ((1, 0), (2, 0), (2, 1), (3, 1), (2, APART), (2, FLAT)):
        assert difference_in_parts(optimizer, settings(optimizer), dims, dim) == 0, (dims, dim)


@pytest.mark.parametrize(("keeps", "why"), [(True, "was given weights as whole"), (False, "whole, keeps is not known")])
def test_weights_that_an_optimizer_was_given_beside_its_groups(keeps, why):
    held = weights()
    optimizer = Chosen(held, whole=held, keeps=keeps)
    with pytest.raises(NotRepeatableError, match=why):
        difference_in_parts(optimizer, settings(optimizer), 2, 0)


def test_an_optimizer_that_steps_only_in_train_mode():
    optimizer = Trains(weights(), lr=0.1)
    assert difference_in_parts(optimizer, settings(optimizer), 2, 0) == 0


def sharded(shape: tuple[int, ...], dim: int, axis: str = "tp") -> nn.Parameter:
    weight = nn.Parameter(torch.ones(shape))
    half = shape[dim]
    sharding = Sharding(dim, 2 * half, (((0, half),), ((half, 2 * half),)))
    whole = tuple(2 * size if index == dim else size for index, size in enumerate(shape))
    set_placement(weight, Placement("model.weight", whole, axis != "tp", {axis: sharding}))
    return weight


def test_the_verdict_names_the_axis_and_a_weight():
    said = tried(Lamb([sharded((4, 6), 1)]), {"tp": 2}, 1).refusal
    assert said.startswith("ds_npu.parallel.tensor: its ranks have parts along dim 1 of 1 weights (model.weight, ...)")
    assert "the optimizer Lamb gives other numbers" in said and "AdamW" in said
    said = tried(Lamb([sharded((4, 6, 2), 2, "etp")]), {"etp": 2}, 0).refusal
    assert said.startswith("ds_npu.parallel.expert_tensor: ")


def test_each_group_is_tried_with_its_own_weights():
    """Muon over whole matrices, AdamW over sharded ones: exact."""
    mixed = torch.optim.AdamW([{"params": [sharded((4, 6), 0)]}, {"params": weights(), "lr": 0.5}])
    assert tried(mixed, {"tp": 2}, 1) == Verdict()
    assert tried(torch.optim.Muon(weights()), {"tp": 2}, 0) == Verdict()


def test_warnings_without_an_axis():
    adafactor = torch.optim.Adafactor(weights())
    for each in (*adafactor.param_groups[0]["params"],):
        set_placement(each, Placement("w", (4, 6)))
    assert tried(adafactor, {"tp": 1}, 0) == Verdict()
    said = tried(adafactor, {"tp": 1}, 2)
    assert said.refusal is None and "ZeRO 2" in said.warning
    unknown = tried(Named([sharded((4, 6), 0)], 0.1), {"tp": 2}, 0)
    assert unknown.refusal is None and "could not be tried" in unknown.warning and "secret" in unknown.warning


def test_the_optimizer_and_random_numbers_stay_as_they_are():
    held = [sharded((4, 6), 0)]
    optimizer = torch.optim.AdamW(held, lr=0.1)
    before, state = [each.detach().clone() for each in held], torch.get_rng_state()
    assert tried(optimizer, {"tp": 2}, 1) == Verdict()
    assert torch.equal(torch.get_rng_state(), state) and not optimizer.state
    assert all(map(torch.equal, held, before)) and held[0].grad is None
