"""What each module of the Hugging Face families is: written down by hand here, for every module of small models."""

from __future__ import annotations

import copy
import pickle
import time
from dataclasses import FrozenInstanceError

import planned_models as models
import pytest
import torch
from planned_models import GROUPED, SIZES, gpt2, llama, made, qwen2_5_vl
from torch import nn

from ds_npu.config.roles import ORDER, Role
from ds_npu.models.globs import plan_for
from ds_npu.models.plan import AttentionShape, ModelPlan, PlanError

ATTENTION = {
    "self_attn": "attention",
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.o_proj": "attention_output",
}
HEAD_NORMS = {"self_attn.q_norm": "head_norm", "self_attn.k_norm": "head_norm"}
MLP = {"mlp": "mlp", "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down"}
MOE = {"mlp": "moe", "mlp.gate": "router", "mlp.experts": "experts"}
NORMS = {"input_layernorm": "norm", "post_attention_layernorm": "norm"}
BESIDE = {"embed_tokens": "embedding", "norm": "final_norm", "rotary_emb": "rotary"}
LLAMA = ATTENTION | MLP | NORMS
LATENT = {
    "self_attn": "attention",
    "self_attn.q_a_proj": "latent",
    "self_attn.q_a_layernorm": "head_norm",
    "self_attn.q_b_proj": "latent_query",
    "self_attn.kv_a_proj_with_mqa": "latent",
    "self_attn.kv_a_layernorm": "head_norm",
    "self_attn.kv_b_proj": "latent_key_value",
    "self_attn.o_proj": "attention_output",
}
SHARED = {
    "mlp.shared_experts": "mlp",
    "mlp.shared_experts.gate_proj": "gate",
    "mlp.shared_experts.up_proj": "up",
    "mlp.shared_experts.down_proj": "down",
}
GPT2 = {
    "ln_1": "norm",
    "attn": "attention",
    "attn.c_attn": "query_key_value",
    "attn.c_proj": "attention_output",
    "ln_2": "norm",
    "mlp": "mlp",
    "mlp.c_fc": "up",
    "mlp.c_proj": "down",
}
PHI3 = {
    "self_attn": "attention",
    "self_attn.qkv_proj": "query_key_value",
    "self_attn.o_proj": "attention_output",
    "mlp": "mlp",
    "mlp.gate_up_proj": "gate_up",
    "mlp.down_proj": "down",
    **NORMS,
}


def written(base, blocks, beside, head=None, layers="layers"):
    """Every module's role, of the decoder at ``base`` with these ``blocks``."""
    stack = {}
    for index, block in enumerate(blocks):
        stack[f"{layers}.{index}"] = "block"
        stack |= {f"{layers}.{index}.{name}": role for name, role in block.items()}
    return {f"{base}{name}": role for name, role in (beside | stack).items()} | (head or {})


def decoder(*blocks):
    return written("model.", blocks, BESIDE, {"lm_head": "head"})


GPT2_BESIDE = {"wte": "embedding", "wpe": "position_embedding", "ln_f": "final_norm"}
DEEPSEEK = (LATENT | MLP | NORMS, LATENT | MOE | SHARED | NORMS, LATENT | MOE | SHARED | NORMS)

# The model, what each of its modules is, the heads of its attentions.
FAMILIES = {
    "llama": (llama, decoder(LLAMA, LLAMA), AttentionShape(4, 2, 8, 8)),
    "llama without head": (
        lambda: llama("LlamaModel"),
        written("", (LLAMA, LLAMA), BESIDE),
        AttentionShape(4, 2, 8, 8),
    ),
    "llama that classifies": (
        lambda: llama("LlamaForSequenceClassification"),
        written("model.", (LLAMA, LLAMA), BESIDE, {"score": "replicated"}),
        AttentionShape(4, 2, 8, 8),
    ),
    "qwen2": (lambda: made("Qwen2ForCausalLM", **GROUPED), decoder(LLAMA, LLAMA), AttentionShape(4, 2, 8, 8)),
    "qwen3": (
        lambda: made("Qwen3ForCausalLM", **GROUPED, head_dim=16),
        decoder(LLAMA | HEAD_NORMS, LLAMA | HEAD_NORMS),
        AttentionShape(4, 2, 16, 16),
    ),
    "mistral": (lambda: made("MistralForCausalLM", **GROUPED), decoder(LLAMA, LLAMA), AttentionShape(4, 2, 8, 8)),
    "gemma": (
        lambda: made("GemmaForCausalLM", **SIZES, num_key_value_heads=1, head_dim=16),
        decoder(LLAMA, LLAMA),
        AttentionShape(4, 1, 16, 16),
    ),
    "gpt2": (
        gpt2,
        written("transformer.", (GPT2, GPT2), GPT2_BESIDE, {"lm_head": "head"}, "h"),
        AttentionShape(4, 4, 8, 8),
    ),
    "phi3": (lambda: made("Phi3ForCausalLM", **GROUPED), decoder(PHI3, PHI3), AttentionShape(4, 2, 8, 8)),
    "mixtral": (
        lambda: made("MixtralForCausalLM", **GROUPED, num_local_experts=4),
        decoder(ATTENTION | MOE | NORMS, ATTENTION | MOE | NORMS),
        AttentionShape(4, 2, 8, 8),
    ),
    "qwen3 moe": (
        models.qwen3_moe,
        decoder(LLAMA | HEAD_NORMS, ATTENTION | HEAD_NORMS | MOE | NORMS),
        AttentionShape(4, 2, 16, 16),
    ),
    "deepseek v3": (models.deepseek_v3, decoder(*DEEPSEEK), AttentionShape(4, 4, 12, 10, latent_key_dim=4)),
    "qwen2.5 vl's language part": (
        models.qwen2_5_vl_text,
        written("", (LLAMA, LLAMA), BESIDE),
        AttentionShape(4, 2, 8, 8),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_module_has_its_role(family):
    make, expected, shape = FAMILIES[family]
    model = make()
    before = copy.deepcopy(model)
    plan = plan_for(model, {})
    assert dict(plan.roles) == expected
    assert list(plan.roles) == [name for name, _ in model.named_modules() if name in expected]
    blocks = [name for name, role in expected.items() if role == "block"]
    assert plan.blocks == tuple(sorted(blocks)) and len(blocks) == (3 if family == "deepseek v3" else 2)
    assert plan.attentions == {name: shape for name, role in expected.items() if role == "attention"}
    assert plan.model == type(model).__name__
    assert str(model) == str(before) and list(model.state_dict()) == list(before.state_dict())


def test_all_that_is_trained_is_in_a_plan():
    for make, _, _ in FAMILIES.values():
        model = make()
        roles = plan_for(model, {}).roles
        assert {name.rpartition(".")[0] for name, _ in model.named_parameters()} <= set(roles)


def test_the_vision_tower_is_whole_and_the_language_part_is_planned():
    model = qwen2_5_vl()
    plan = plan_for(model, {})
    vision = {name: role for name, role in plan.roles.items() if name.startswith("model.visual.")}
    trained = {name.rpartition(".")[0] for name, _ in model.model.visual.named_parameters(prefix="model.visual")}
    # The patches, of each of 2 blocks 2 norms and 5 linears, of the merger a norm and 2 linears.
    assert set(vision) == trained and len(vision) == 1 + 2 * 7 + 3 and set(vision.values()) == {Role.REPLICATED}
    rest = {name: role for name, role in plan.roles.items() if name not in vision}
    assert rest == written("model.language_model.", (LLAMA, LLAMA), BESIDE, {"lm_head": "head"})
    assert plan.blocks == ("model.language_model.layers.0", "model.language_model.layers.1")
    assert plan.embedding == "model.language_model.embed_tokens" and plan.head == "lm_head"


def test_queries_without_a_latent():
    """As in the small models of DeepSeek."""
    plan = plan_for(models.deepseek_v3(q_lora_rank=None), {})
    assert plan.of("model.layers.0.self_attn.q_proj") is Role.QUERY
    assert plan.named(Role.LATENT_QUERY) == []
    assert plan.attentions["model.layers.0.self_attn"] == AttentionShape(4, 4, 12, 10, 4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("make", "embedding"),
    [
        (lambda tied: llama(tie_word_embeddings=tied), "model.embed_tokens"),
        (lambda tied: gpt2(tie_word_embeddings=tied), "transformer.wte"),
        (qwen2_5_vl, "model.language_model.embed_tokens"),
    ],
)
def test_whether_the_head_is_the_embedding(make, embedding, tied):
    plan = plan_for(make(tied), {})
    assert (plan.embedding, plan.head, plan.tied) == (embedding, "lm_head", tied)


def test_without_a_head_nothing_is_tied():
    plan = plan_for(llama("LlamaModel", tie_word_embeddings=True), {})
    assert (plan.embedding, plan.head, plan.tied) == ("embed_tokens", None, False)


def test_the_order_of_more_than_ten_blocks():
    plan = plan_for(made("LlamaForCausalLM", **{**GROUPED, "num_hidden_layers": 12}), {})
    assert plan.blocks == tuple(f"model.layers.{index}" for index in range(12))


def test_what_stands_around_a_module():
    plan = plan_for(models.deepseek_v3(), {})
    shared = "model.layers.1.mlp.shared_experts"
    assert plan.sublayer(f"{shared}.gate_proj") == shared
    assert plan.sublayer(shared) == plan.sublayer("model.layers.1.mlp.experts") == "model.layers.1.mlp"
    assert plan.sublayer("model.layers.2.self_attn.kv_b_proj") == "model.layers.2.self_attn"
    assert plan.sublayer("model.layers.1.mlp") is None and plan.sublayer("lm_head") is None
    assert plan.block(f"{shared}.gate_proj") == "model.layers.1" and plan.block("model.norm") is None
    assert plan.around(f"{shared}.gate_proj", Role.MOE) == "model.layers.1.mlp"
    assert plan.inside("model.layers.1.mlp", Role.GATE, Role.ROUTER) == [
        "model.layers.1.mlp.gate",
        f"{shared}.gate_proj",
    ]
    assert plan.inside(shared) == [f"{shared}.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    assert len(plan.inside("")) == len(plan.roles) and plan.of("nowhere") is None
    assert plan.named(Role.EMBEDDING, Role.HEAD) == ["model.embed_tokens", "lm_head"]
    assert plan.adapted("lm_head") is None


def test_a_plan_is_data():
    plan = plan_for(llama(), {})
    assert pickle.loads(pickle.dumps(plan)) == plan and isinstance(plan, ModelPlan)
    with pytest.raises(FrozenInstanceError):
        plan.tied = True


def test_the_picture():
    assert (
        plan_for(models.deepseek_v3(tie_word_embeddings=True), {}).picture()
        == """\
Plan of DeepseekV3ForCausalLM
  model.embed_tokens                                embedding
  model.layers.{0..2}                               block
  model.layers.{0..2}.self_attn                     attention: 4 heads of 12, values of 10
  model.layers.{0..2}.self_attn.q_a_proj            latent
  model.layers.{0..2}.self_attn.q_a_layernorm       head_norm
  model.layers.{0..2}.self_attn.q_b_proj            latent_query
  model.layers.{0..2}.self_attn.kv_a_proj_with_mqa  latent
  model.layers.{0..2}.self_attn.kv_a_layernorm      head_norm
  model.layers.{0..2}.self_attn.kv_b_proj           latent_key_value
  model.layers.{0..2}.self_attn.o_proj              attention_output
  model.layers.0.mlp                                mlp
  model.layers.0.mlp.gate_proj                      gate
  model.layers.0.mlp.up_proj                        up
  model.layers.0.mlp.down_proj                      down
  model.layers.{0..2}.input_layernorm               norm
  model.layers.{0..2}.post_attention_layernorm      norm
  model.layers.{1..2}.mlp                           moe
  model.layers.{1..2}.mlp.experts                   experts
  model.layers.{1..2}.mlp.gate                      router
  model.layers.{1..2}.mlp.shared_experts            mlp
  model.layers.{1..2}.mlp.shared_experts.gate_proj  gate
  model.layers.{1..2}.mlp.shared_experts.up_proj    up
  model.layers.{1..2}.mlp.shared_experts.down_proj  down
  model.norm                                        final_norm
  model.rotary_emb                                  rotary
  lm_head                                           head, tied to model.embed_tokens"""
    )


def test_the_picture_of_a_tower_is_one_row():
    lines = plan_for(qwen2_5_vl(), {}).picture().splitlines()
    assert lines[1].split() == ["model.visual.**", "replicated"]
    attention = "attention: 4 heads of 8, 2 for keys and values"
    assert next(line for line in lines if "self_attn " in line).split(maxsplit=1)[1] == attention
    assert len(lines) == 1 + 1 + 3 + 1 + len(LLAMA) + 1


# ---- what is not known is not guessed ----


def refused(model):
    with pytest.raises(PlanError) as caught:
        plan_for(model, {})
    return caught.value


@pytest.mark.parametrize(
    ("make", "problems"),
    [
        pytest.param(
            lambda: gpt2(add_cross_attention=True),
            [
                "transformer.h.{0..1}.crossattention.q_attn (Conv1D, weight [32, 32], bias [32]): "
                "nothing says what it is",
                "transformer.h.{0..1}.crossattention.c_attn (Conv1D, weight [32, 64], bias [64]): the query_key_value "
                "of 4 heads of 8 has 96 outputs, not 64",
            ],
            id="cross attention",
        ),
        pytest.param(
            lambda: made(
                "CodeGenForCausalLM", n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=64, rotary_dim=4
            ),
            [
                "transformer.h.{0..1}.attn.qkv_proj (Linear, weight [96, 32]): its weight holds several parts, whose "
                f"order is not known; query_key_value means {ORDER[Role.QUERY_KEY_VALUE]}",
            ],
            id="codegen",
        ),
    ],
)
def test_a_family_that_is_built_in_another_way_is_refused(make, problems):
    assert list(refused(make()).problems) == problems


def test_an_encoder_is_not_taken_for_a_part_beside_the_decoder():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
    error = refused(made("T5ForConditionalGeneration", "T5", **sizes))
    assert any(problem.startswith("encoder.block.{0..1}.layer.0.SelfAttention.q (") for problem in error.problems)
    assert any(problem.startswith("lm_head (") for problem in error.problems)


def test_a_module_that_was_put_into_the_model_is_named_with_what_to_do():
    model = llama()
    for layer in model.model.layers:
        layer.mlp.extra = nn.Linear(32, 16, device="meta")
    model.model.layers[0].mlp.mix = nn.Conv1d(32, 1, 4, bias=False, device="meta")
    model.model.layers[1].self_attn.q_proj = nn.Linear(32, 40, bias=False, device="meta")
    assert (
        str(refused(model))
        == """\
LlamaForCausalLM is a decoder of transformers, which ds_npu knows but for what is named here.
3 mistakes in the plan of LlamaForCausalLM:
  model.layers.{0..1}.mlp.extra (Linear, weight [16, 32], bias [16]): nothing says what it is
  model.layers.0.mlp.mix (Conv1d, weight [1, 32, 4]): nothing says what it is
  model.layers.1.self_attn.q_proj (Linear, weight [40, 32]): the query of 4 heads of 8, 2 for keys and values has 32 \
outputs, not 40
Say what a module is in the DeepSpeed config, * standing for any part of a name and ** for any number of parts:
  "ds_npu": {"plan": {"model.layers.*.mlp.extra": "<role>"}}
Roles: ROLES
Of a weight that holds several parts, the role says the order along its output:
  query_key_value: all heads' queries, then all keys, then all values; not head by head
  query_key_value_by_group: for each head of keys its queries, then the key, then the value
  latent_key_value: for each head its keys, then its values
  gate_up: all gates, then all ups; not by turns
  experts: gate_up_proj [E, 2I, H], all gates, then all ups; down_proj [E, H, I]
In any other order: give the module around it (the attention, the MLP) the role replicated.""".replace(
            "ROLES", ", ".join(Role)
        )
    )


def test_the_width_of_an_mlp_is_that_of_its_down_projection():
    model = llama()
    model.model.layers[0].mlp.gate_proj = nn.Linear(32, 40, bias=False, device="meta")
    (problem,) = refused(model).problems
    assert problem == (
        "model.layers.0.mlp.gate_proj (Linear, weight [40, 32]): the gate beside a down with 48 inputs has 48 "
        "outputs, not 40"
    )


def test_weights_that_zero_3_has_split_have_their_whole_shape():
    model = llama()
    for parameter in model.parameters():
        vars(parameter)["ds_shape"] = parameter.shape
        parameter.data = torch.empty(0, device="meta")
    assert dict(plan_for(model, {}).roles) == FAMILIES["llama"][1]


def test_a_model_of_80_blocks_is_planned_in_a_second():
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    model = made("LlamaForCausalLM", **sizes, num_key_value_heads=8, vocab_size=128256)
    begun = time.process_time()
    assert len(plan_for(model, {}).blocks) == 80
    assert time.process_time() - begun < 1.0
