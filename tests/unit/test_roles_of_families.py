"""Roles of the modules of families that are built in other ways than Llama, written down by hand."""

from __future__ import annotations

import pytest
import tiny_models
from planned_models import GROUPED, SIZES, made
from test_model_plan import ATTENTION, MLP, NORMS, decoder, written

from ds_npu.config.roles import Role
from ds_npu.models.globs import plan_for
from ds_npu.models.plan import AttentionShape

OLMO2 = {
    **ATTENTION,
    **{"self_attn.q_norm": "sharded_norm", "self_attn.k_norm": "sharded_norm"},
    **MLP,
    **{"post_attention_layernorm": "norm", "post_feedforward_layernorm": "norm"},
}
NEOX = {
    "attention": "attention",
    "attention.query_key_value": "query_key_value_by_group",
    "attention.dense": "attention_output",
    "mlp": "mlp",
    "mlp.dense_h_to_4h": "column",
    "mlp.dense_4h_to_h": "row",
    **NORMS,
}
OPT = {
    "self_attn": "attention",
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.out_proj": "attention_output",
    "self_attn_layer_norm": "norm",
    "fc1": "column",
    "fc2": "row",
    "final_layer_norm": "norm",
}
FAMILIES = {
    "olmo2": (
        lambda: made("Olmo2ForCausalLM", **GROUPED),
        decoder(OLMO2, OLMO2),
        AttentionShape(4, 2, 8, 8),
    ),
    "gpt neox": (
        lambda: made("GPTNeoXForCausalLM", **SIZES),
        written(
            "gpt_neox.",
            (NEOX, NEOX),
            {"embed_in": "embedding", "final_layer_norm": "final_norm", "rotary_emb": "rotary"},
            {"lm_head": "head"},
        ),
        AttentionShape(4, 4, 8, 8),
    ),
    "gpt oss": (
        lambda: made("GptOssForCausalLM", **GROUPED, head_dim=8, num_local_experts=4),
        decoder(*[ATTENTION | {"mlp": "moe", "mlp.router": "router", "mlp.experts": "experts"} | NORMS] * 2),
        AttentionShape(4, 2, 8, 8),
    ),
    "opt": (
        lambda: made("OPTForCausalLM", **SIZES, ffn_dim=48, word_embed_proj_dim=32),
        written(
            "model.decoder.",
            (OPT, OPT),
            {"embed_tokens": "embedding", "embed_positions": "position_embedding", "final_layer_norm": "final_norm"},
            {"lm_head": "head"},
        ),
        AttentionShape(4, 4, 8, 8),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_of_other_structures_have_their_roles(family):
    make, expected, shape = FAMILIES[family]
    plan = plan_for(make(), {})
    assert dict(plan.roles) == expected
    assert plan.attentions == {name: shape for name, role in expected.items() if role == "attention"}


def test_the_blocks_of_a_model_that_takes_itself_for_its_decoder():
    """transformers' Llama4ForCausalLM has no attribute of its base_model_prefix."""
    model = tiny_models.tiny("llama4_text")
    assert model.get_decoder() is model
    assert list(plan_for(model, {}).named(Role.BLOCK)) == ["model.layers.0", "model.layers.1"]
