"""Choices of experts, recorded in one forward and replayed in another."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from torch import nn

from ds_npu.parallel import RoutingRecord, record_routing, replay_routing

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")
IDS = tiny_models.tokens(2, 9)


def logits_of(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model(input_ids=ids, output_router_logits=False).logits


def changed(model: nn.Module) -> nn.Module:
    """Routers that choose otherwise."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate.weight" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_chooses_what_was_recorded(family):
    model = tiny_models.tiny(family)
    with record_routing(model) as record:
        logits_of(model)
        logits_of(model, IDS.flip(0))
    other = changed(tiny_models.tiny(family))
    with record_routing(other) as of_other:
        free = logits_of(other)
    assert any(not torch.equal(each[-1], record.choices[name][-1]) for name, each in of_other.choices.items())
    with replay_routing(other, record), record_routing(other) as again:
        first, second = logits_of(other), logits_of(other, IDS.flip(0))
    assert again.choices.keys() == record.choices.keys()
    for name, each in record.choices.items():
        # The recorder stands outside of the replay, and sees what comes of it.
        assert all(torch.equal(one, two) for one, two in zip(again.choices[name], each, strict=True)), name
    assert not torch.allclose(first, free) and torch.allclose(first, second.flip(0), atol=1e-6)


def test_gradients_reach_the_router_by_the_replayed_choices():
    model = changed(tiny_models.tiny("mixtral"))
    with record_routing(model) as record:
        expected = logits_of(model)
    expected.square().sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    model.zero_grad()
    with replay_routing(model, record):
        logits_of(model).square().sum().backward()
    assert all(torch.equal(each.grad, gradients[name]) for name, each in model.named_parameters())


def test_what_does_not_fit_is_an_error():
    model = tiny_models.tiny("mixtral")
    with record_routing(model) as record:
        logits_of(model)
    with (
        replay_routing(model, record),
        pytest.raises(RuntimeError, match=r"chooses \[8, 2\], and recorded was \[18, 2\]"),
    ):
        logits_of(model, IDS[:, :4])
    with (
        replay_routing(model, record),
        pytest.raises(RuntimeError, match=r"nothing is left that was recorded of model\."),
    ):
        logits_of(model)
        logits_of(model)
    with (
        pytest.raises(ValueError, match="LlamaForCausalLM has no module that holds experts"),
        record_routing(tiny_models.tiny("llama")),
    ):
        pass
    with (
        pytest.raises(ValueError, match="has no module moe, which was named as a block"),
        record_routing(model, ["moe"]),
    ):
        pass
    with replay_routing(model, RoutingRecord()), pytest.raises(RuntimeError, match="nothing is left"):
        logits_of(model)
    # After an error nothing is left on the model or in torch.
    assert torch.topk(torch.tensor([1.0, 2.0]), 1).indices.tolist() == [1]
    assert logits_of(model).isfinite().all()
