"""``ds_npu.deterministic``: it changes no number of what runs, and an operator that cannot repeat is an error."""

from __future__ import annotations

import deepspeed
import pytest
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
from gradient_rule import without_extension
from memory_rule import DROPS, WORLDS, same
from ranks import run_on_ranks
from torch import nn
from torch.nn.functional import max_pool2d, max_unpool2d

from ds_npu.config.problems import ConfigError

KEY: dict[str, object] = {"deterministic": True}
CORNERS = [("tensor 2 x context 2", "llama", (1, 3)), ("expert 2", "qwen3_moe", (2,))]
CASES = [
    (world, family, (0, 1, 2, 3))
    for world in WORLDS
    for family in ("llama", "gpt2", "qwen3_moe")
    if world != "expert 2" or family == "qwen3_moe"
]


def same_numbers(family: str, parallel: dict[str, object], stages: tuple[int, ...]) -> None:
    without_extension()
    changes = DROPS.get(family, {})
    for stage in stages:
        # Of the whole process, so also of the engines that follow.
        torch.use_deterministic_algorithms(False)
        same(
            lambda: tiny_models.tiny(family, torch.float32, **changes), stage, {"parallel": parallel}, {"with it": KEY}
        )
        assert torch.are_deterministic_algorithms_enabled()


def refused() -> None:
    without_extension()
    model = torch.nn.Linear(4, 4)
    config = tensor_rule.config(1, torch.float32, KEY)
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("HCCL_DETERMINISTIC", "FALSE")
        with pytest.raises(ConfigError, match=r"ds_npu\.deterministic: found true; no value while HCCL_DETERMINISTIC"):
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    pooled, places = max_pool2d(torch.randn(1, 1, 4, 4), 2, return_indices=True)
    with pytest.raises(RuntimeError, match="max_unpooling2d_forward_out does not have a deterministic implementation"):
        max_unpool2d(pooled, places, 2)
    # What memory held before: with the option of torch, NaN.
    assert not torch.utils.deterministic.fill_uninitialized_memory


class Unpooling(nn.Module):
    """Its operator has no deterministic form, on any device."""

    def forward(self, x):
        pooled, places = max_pool2d(x, 2, return_indices=True)
        return max_unpool2d(pooled, places, 2)


class Scattering(nn.Module):
    """Writes its input by ``put_``, of which the last one of several writes is kept."""

    def forward(self, x):
        return torch.zeros_like(x).put_(torch.arange(x.numel()), x.flatten())


class Unfit(nn.Module):
    """Two modules that no run repeats, and one that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unpooling, self.scattering = nn.Linear(4, 4), Unpooling(), Scattering()

    def forward(self, x_BCHW):
        return self.scattering(self.unpooling(self.first(x_BCHW))).square().mean()


def unfit_operators(stages: list[int]) -> None:
    """The first step names all of them, and the weights are as before."""
    without_extension()
    for stage in stages:
        model = Unfit()
        config = tensor_rule.config(stage, torch.float32, KEY)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        before = [each.detach().clone() for each in model.parameters()]
        engine.backward(engine(torch.randn(2, 1, 4, 4)))
        with pytest.raises(RuntimeError, match=r"ds_npu\.deterministic: 2 operators have no determ") as caught:
            engine.step()
            engine.backward(engine(torch.randn(2, 1, 4, 4)))
            engine.step()
        text = str(caught.value)
        assert "\n  aten.max_unpool2d.default: unpooling (Unpooling)\n" in text, text
        assert "\n  aten.put_.default: scattering (Scattering)\n" in text, text
        assert all(map(torch.equal, before, model.parameters()))
        assert (
            torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
        # Nothing watches behind the first step: torch's own error comes at once.
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            engine(torch.randn(2, 1, 4, 4))


def test_the_first_step_names_operators_that_cannot_repeat():
    run_on_ranks(1, unfit_operators, [0, 1])


@pytest.mark.slow
@pytest.mark.matrix(corners=len(CORNERS), drawn=1)
@pytest.mark.parametrize(("world", "family", "stages"), [*CORNERS, *CASES], ids=str)
def test_numbers_are_those_without_it(world, family, stages):
    ranks, parallel = WORLDS[world]
    run_on_ranks(ranks, same_numbers, family, parallel, stages)


@pytest.mark.slow
def test_what_cannot_repeat_is_refused():
    run_on_ranks(1, refused)
