"""LoRA adapters leave every layer its role, and belong to the layer that they are added to."""

from __future__ import annotations

import peft
import pytest
import torch
from planned_models import GROUPED, gpt2, llama, made, qwen2_5_vl
from torch import nn

from ds_npu.config.roles import Role
from ds_npu.models.globs import plan_for
from ds_npu.models.plan import PlanError

PREFIX = "base_model.model."


def adapted(model, *targets, **settings):
    with torch.device("meta"):
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=list(targets), **settings))


def with_adapters(plain, *targets):
    """The roles of a plain model's modules, put in PEFT's names."""
    roles = {}
    for name, role in plain.roles.items():
        if name.rpartition(".")[2] in targets:
            roles[f"{PREFIX}{name}.base_layer"] = role
            roles[f"{PREFIX}{name}.lora_A.default"] = "lora_a"
            roles[f"{PREFIX}{name}.lora_B.default"] = "lora_b"
        else:
            roles[f"{PREFIX}{name}"] = role
    return roles


@pytest.mark.parametrize(
    ("make", "targets"),
    [
        (llama, ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "lm_head")),
        (lambda: llama("LlamaModel"), ("k_proj", "up_proj")),
        (gpt2, ("c_attn", "c_proj")),
        (lambda: qwen2_5_vl().model.language_model, ("q_proj",)),
    ],
)
def test_layers_with_adapters_keep_their_roles(make, targets):
    plain = plan_for(make(), {})
    plan = plan_for(adapted(make(), *targets), {})
    assert dict(plan.roles) == with_adapters(plain, *targets)
    assert plan.blocks == tuple(f"{PREFIX}{name}" for name in plain.blocks)
    assert plan.attentions == {f"{PREFIX}{name}": shape for name, shape in plain.attentions.items()}
    assert plan.tied == plain.tied


def test_a_factor_knows_its_layer():
    plan = plan_for(adapted(llama(), "q_proj", "lm_head"), {})
    attention = f"{PREFIX}model.layers.1.self_attn"
    for factor in ("lora_A", "lora_B"):
        name = f"{attention}.q_proj.{factor}.default"
        assert plan.adapted(name) == f"{attention}.q_proj.base_layer"
        assert (plan.sublayer(name), plan.block(name)) == (attention, f"{PREFIX}model.layers.1")
    assert plan.adapted(f"{attention}.q_proj.base_layer") is None and plan.adapted(f"{attention}.k_proj") is None
    assert plan.head == f"{PREFIX}lm_head.base_layer" and plan.adapted(f"{PREFIX}lm_head.lora_A.default") == plan.head


def test_an_adapter_of_the_embedding():
    plan = plan_for(adapted(llama(), "embed_tokens"), {})
    embedding = f"{PREFIX}model.embed_tokens"
    assert plan.embedding == f"{embedding}.base_layer"
    assert plan.of(f"{embedding}.lora_embedding_A") is Role.LORA_A
    assert plan.of(f"{embedding}.lora_embedding_B") is Role.LORA_B
    assert plan.adapted(f"{embedding}.lora_embedding_B") == plan.embedding


def test_two_adapters_on_some_of_the_blocks():
    model = adapted(llama(), "q_proj", layers_to_transform=[1])
    with torch.device("meta"):
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"]))
    plan = plan_for(model, {})
    block = f"{PREFIX}model.layers.1.self_attn"
    expected = [f"{block}.q_proj.lora_A.default", f"{block}.q_proj.lora_A.other", f"{block}.k_proj.lora_A.other"]
    assert plan.inside(block, Role.LORA_A) == expected
    assert plan.inside(f"{PREFIX}model.layers.0", Role.LORA_B) == [
        f"{PREFIX}model.layers.0.self_attn.{name}_proj.lora_B.other" for name in "qk"
    ]


def test_copies_that_are_trained_have_the_role_of_what_they_stand_for():
    plan = plan_for(adapted(llama("LlamaForSequenceClassification"), "q_proj", task_type="SEQ_CLS"), {})
    score = f"{PREFIX}score"
    assert plan.inside(score) == [f"{score}.original_module", f"{score}.modules_to_save.default"]
    assert {plan.of(name) for name in plan.inside(score)} == {Role.REPLICATED}
    plan = plan_for(adapted(llama(), "q_proj", modules_to_save=["lm_head"]), {})
    head = f"{PREFIX}lm_head"
    assert plan.named(Role.HEAD) == [f"{head}.original_module", f"{head}.modules_to_save.default"]
    # Of both, the copy gives the logits.
    assert plan.head == f"{head}.modules_to_save.default"


def test_adapters_of_what_is_whole_are_whole():
    plan = plan_for(adapted(qwen2_5_vl(), "qkv", "q_proj"), {})
    tower = plan.inside(f"{PREFIX}model.visual")
    assert sum("lora_" in name for name in tower) == 4 and {plan.of(name) for name in tower} == {Role.REPLICATED}
    assert len(plan.named(Role.LORA_A)) == len(plan.named(Role.LORA_B)) == 2


def test_globs_need_not_know_of_adapters():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to("meta")
    globs = {"0": "column", "2": "row"}
    plan = plan_for(adapted(model, "0", "2"), globs)
    assert dict(plan.roles) == with_adapters(plan_for(model_without_adapters(), globs), "0", "2")
    plan = plan_for(adapted(llama(), "q_proj", "up_proj"), {"model.layers.*.mlp.up_proj": "column"})
    assert plan.of(f"{PREFIX}model.layers.0.mlp.up_proj.base_layer") is Role.COLUMN
    assert plan.of(f"{PREFIX}model.layers.0.mlp.up_proj.lora_A.default") is Role.LORA_A


def model_without_adapters():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


@pytest.mark.parametrize("parameters", [["gate_up_proj"], ["gate_up_proj", "down_proj"]])
def test_adapters_of_experts_have_roles(parameters):
    """Tensor ranks alone cannot shard them: tests/engine/test_experts.py."""
    model = made("MixtralForCausalLM", **GROUPED, num_local_experts=4)
    plan = plan_for(adapted(model, "q_proj", target_parameters=[f"mlp.experts.{name}" for name in parameters]), {})
    for role in (Role.LORA_A, Role.LORA_B):
        of_experts = [name for name in plan.named(role) if ".experts." in name]
        assert len(of_experts) == 2 * len(parameters)
        assert {plan.roles[plan.adapted(name)] for name in of_experts} == {Role.EXPERTS}


def test_other_adapters_of_a_layer_that_is_split_are_refused():
    model = adapted(llama(), "q_proj", use_dora=True)
    name = f"{PREFIX}model.layers.{{0..1}}.self_attn.q_proj.lora_magnitude_vector.default"
    problem = "of what PEFT adds to a query, only the two factors of LoRA can be sharded"
    for globs in ({}, {"**.lora_magnitude_vector.default": "replicated"}):
        with pytest.raises(PlanError) as caught:
            plan_for(model, globs)
        assert caught.value.problems == (f"{name} (DoraLinearLayer, weight [32]): {problem}",)
