"""Blocks that scale what their experts take (Llama-4): known by what they compute, and routed to the chosen experts."""

from __future__ import annotations

import pytest
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_on_ranks

from ds_npu.config.moe import MoeSection
from ds_npu.features.build import Build
from ds_npu.features.driver import apply_features
from ds_npu.features.experts.expert_ranks import MOE
from ds_npu.features.modules.scaled_inputs import takes_scaled_inputs
from ds_npu.parallel import record_routing, replay_routing
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

EXPERTS = "model.layers.0.feed_forward.experts"


def placed(section: MoeSection) -> torch.nn.Module:
    model = tiny_models.tiny("llama4_text")
    apply_features(
        [(MOE, section)], Build(Topology(Degrees(dp=dist.get_world_size(), ep=dist.get_world_size())), model)
    )
    return model


def outputs(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with tiny_models.Float64():
        return model(input_ids=ids).logits


def test_blocks_are_known_by_what_they_compute():
    model = tiny_models.tiny("llama4_text")
    assert takes_scaled_inputs(model, EXPERTS, {})
    others = tiny_models.tiny("mixtral")
    assert not any(takes_scaled_inputs(others, name, {}) for name, _ in others.named_modules())

    class Mean(type(model.get_submodule("model.layers.0.feed_forward"))):
        def forward(self, hidden_states):
            out, logits = super().forward(hidden_states)
            return out / 2, logits

    class Swapped(type(model.get_submodule(EXPERTS))):
        def forward(self, hidden_states):
            up, gate = (hidden_states.view(4, -1, 32) @ self.gate_up_proj).chunk(2, dim=-1)
            return ((up * self.act_fn(gate)) @ self.down_proj).view(-1, 32)

    for name, other in (("model.layers.0.feed_forward", Mean), (EXPERTS, Swapped)):
        changed = tiny_models.tiny("llama4_text")
        changed.get_submodule(name).__class__ = other
        assert not takes_scaled_inputs(changed, EXPERTS, {}), other


def replay() -> None:
    plain, model, ids = (
        tiny_models.tiny("llama4_text"),
        placed(MoeSection(grouped_matmul=True)),
        tiny_models.tokens(2, 7),
    )
    with record_routing(plain) as record:
        outputs(plain, ids)
    torch.manual_seed(3)
    torch.nn.init.normal_(plain.get_submodule("model.layers.0.feed_forward.router").weight)
    with torch.no_grad():
        router = plain.get_submodule("model.layers.0.feed_forward.router").weight
        model.get_submodule("model.layers.0.feed_forward.router").weight.copy_(router)
    with replay_routing(plain, record):
        expected = outputs(plain, ids)
    with replay_routing(model, record):
        found = outputs(model, ids)
    assert (found - expected).abs().max() <= 1e-12 < (outputs(plain, ids) - expected).abs().max()


def not_told() -> None:
    with pytest.raises(ValueError, match=r"is not told which experts its tokens chose.*grouped_matmul true"):
        placed(MoeSection(z_loss=0.1))
    placed(MoeSection(z_loss=0.1, grouped_matmul=True))


def test_routing_of_a_plain_model_is_replayed():
    run_on_ranks(2, replay)


def test_choices_that_are_not_told_are_not_counted():
    run_on_ranks(1, not_told)
