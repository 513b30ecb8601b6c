"""Only attention mixes tokens in a model whose sequences are sharded: a module that may mix them is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny_models
import torch
from sequence_sharded_models import algorithm
from torch import nn

from ds_npu.features.context_parallel.sharded_sequences import shard_sequences, shardable_model
from ds_npu.models import kinds
from ds_npu.models.globs import partial_plan_for
from ds_npu.models.plan import PlanError


class Shift(nn.Module):
    """Without weights: a plan does not know of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.roll(1, 1)


class Weighted(Shift):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9, 9))


STRANGERS = {
    "no weights": Shift,
    "a matrix": Weighted,
    "a convolution over pictures": lambda: nn.Conv2d(1, 1, 3),
    "a recurrence": lambda: nn.GRU(32, 32),
    "another attention": lambda: nn.MultiheadAttention(32, 4),
    "a norm over the batch": lambda: nn.BatchNorm1d(32),
    "a norm over groups": lambda: nn.GroupNorm(1, 32),
    "a softmax": lambda: nn.Softmax(1),
    "a pool": lambda: nn.AvgPool1d(3),
    "a padding": lambda: nn.ZeroPad2d((0, 0, 1, -1)),
}


def llama() -> nn.Module:
    return tiny_models.tiny("llama")


@pytest.mark.parametrize("name", STRANGERS)
@pytest.mark.parametrize("place", ["model.layers.1", "model.layers.0.self_attn", "model.layers.1.mlp", "model"])
def test_a_stranger_is_refused(name, place):
    model = llama()
    model.get_submodule(place).add_module("stranger", STRANGERS[name]())
    inside = f"{place}.stranger".removeprefix("model.")
    said = rf"LlamaForCausalLM has {inside} .*works on each token by itself"
    for globs in ({}, {f"{place}.stranger": "replicated"}):
        kept = dict(vars(model))
        with pytest.raises(ValueError, match=said):
            plan = partial_plan_for(model, {} if not kinds.own_shapes(model.get_submodule(place).stranger) else globs)
            shard_sequences(model, plan, SimpleNamespace(), algorithm("ring", 2))
        assert vars(model) == kept


def test_a_role_says_that_a_stranger_stays_on_its_token():
    model = llama()
    model.model.layers[0].mlp.add_module("stranger", Weighted())
    assert shardable_model(model, partial_plan_for(model, {"model.layers.0.mlp.stranger": "column"})) is model


def test_an_attention_must_take_its_function_from_transformers():
    model = llama()
    own = type("OwnAttention", (type(model.model.layers[1].self_attn),), {"forward": lambda self, x, **_: (x, None)})
    model.model.layers[1].self_attn.__class__ = own
    with pytest.raises(
        ValueError, match=r"layers.1.self_attn \(OwnAttention\), and nothing says that it works on each"
    ):
        shardable_model(model, partial_plan_for(model, {}))


def test_a_sketch_needs_nothing_but_right_globs():
    model = llama()
    model.model.layers[0].add_module("stranger", Weighted())
    assert partial_plan_for(model, {}).attentions.keys() == {f"model.layers.{index}.self_attn" for index in range(2)}
    for globs, said in (
        ({"model.layer.*": "block"}, "matches no module"),
        ({"model.norm": "column"}, "column is for a"),
    ):
        with pytest.raises(PlanError, match=said):
            partial_plan_for(model, globs)
