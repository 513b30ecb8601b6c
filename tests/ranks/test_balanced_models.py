"""Balance losses of a model by itself: whose loss they are added to, by which share, and what is refused."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from expert_balance import Recorded
from ranks import run_on_ranks
from torch import nn

from ds_npu.config.moe import AuxLossSection, MoeSection
from ds_npu.features.build import Build
from ds_npu.features.driver import apply_features
from ds_npu.features.experts.expert_ranks import MOE
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

SECTION = MoeSection(aux_loss=AuxLossSection(coefficient=0.3), z_loss=0.1)
AS_A_DICT = {"aux_loss": {"coefficient": 0.3}, "z_loss": 0.1}
IDS = tiny_models.tokens(2, 9)
GIVEN = {"input_ids": IDS, "labels": IDS}


def balanced(model: nn.Module, section: MoeSection = SECTION) -> nn.Module:
    apply_features([(MOE, section)], Build(Topology(Degrees()), model))
    return model


def plain(**changes: object) -> nn.Module:
    return tiny_models.tiny("qwen3_moe", output_router_logits=False, **changes)


def losses() -> tuple[float, torch.Tensor]:
    """Of one process, the loss without and the balance losses."""
    model = plain()
    recorded = Recorded(model)
    with tiny_models.Float64():
        loss = model(**GIVEN).loss.item()
    return loss, recorded.loss(AS_A_DICT, 2).item()


class Outer(nn.Module):
    """A script's own model around one of transformers, which returns the loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = plain()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(input_ids=input_ids, labels=labels).loss


def added() -> None:
    loss, more = losses()
    model, outer = balanced(plain()), balanced(Outer())
    with tiny_models.Float64():
        assert model(**GIVEN).loss.item() == pytest.approx(loss + more, rel=1e-12)
        assert outer(IDS, IDS).item() == pytest.approx(2 * loss + more, rel=1e-12)
        # In evaluation, or without a graph, the loss is the model's own.
        with torch.no_grad():
            assert model(**GIVEN).loss.item() == pytest.approx(loss, rel=1e-12)
        assert model.eval()(**GIVEN).loss.item() == pytest.approx(loss, rel=1e-12)
        # A Trainer that divides by the labels of several micro-batches adds their losses.
        shared = model.train()(**GIVEN, num_items_in_batch=64).loss.item()
    assert shared == pytest.approx((loss + more) * 16 / 64, rel=1e-12)


def checkpointed() -> None:
    found = []
    for kwargs in (None, {"use_reentrant": False}):
        # Not in float64: Float64 does not reach into a backward.
        model = plain().float()
        if kwargs:
            model.gradient_checkpointing_enable(kwargs)
        balanced(model)
        model(**GIVEN).loss.backward()
        found.append({name: each.grad for name, each in model.named_parameters()})
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name]), name


def refused() -> None:
    model = balanced(plain())
    with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM returns in training, and it returned none"):
        model(input_ids=IDS)
    model.eval()(input_ids=IDS)
    model = plain()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.get_input_embeddings().register_forward_hook(lambda _, args, out: out.requires_grad_())
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.gate runs without a graph"):
        balanced(model)(**GIVEN)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no module of experts"):
        balanced(tiny_models.tiny("llama"))
    model = plain()
    type(model)._can_record_outputs, before = None, type(model)._can_record_outputs
    for module in model.modules():
        if "_can_record_outputs" in vars(module):
            module._can_record_outputs = None
    type(model.model)._can_record_outputs, inner = None, type(model.model)._can_record_outputs
    try:
        with pytest.raises(ValueError, match=r"the router of model.layers.1.mlp.experts in Qwen3Moe.* is not known"):
            balanced(model)
    finally:
        type(model)._can_record_outputs, type(model.model)._can_record_outputs = before, inner


def every_case() -> None:
    added()
    checkpointed()
    refused()


def test_losses_are_added_to_that_of_the_model():
    run_on_ranks(1, every_case)
