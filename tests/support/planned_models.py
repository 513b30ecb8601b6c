"""Small models of each family that ds_npu plans, without memory for their weights."""

from __future__ import annotations

import torch
import transformers

transformers.logging.set_verbosity_error()

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64, "pad_token_id": 0}
MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 4,
    "v_head_dim": 10,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
}
ANGLES = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
    "fullatt_block_indexes": [1],
}


def made(name, family=None, **settings):
    """transformers' class ``name`` with its family's config."""
    family = family or name.removesuffix("ForCausalLM")
    with torch.device("meta"):
        return getattr(transformers, name)(getattr(transformers, f"{family}Config")(**settings))


def llama(name="LlamaForCausalLM", **settings):
    return made(name, "Llama", **GROUPED, **settings)


def gpt2(name="GPT2LMHeadModel", **settings):
    return made(name, "GPT2", **GPT2, **settings)


def qwen3_moe():
    return made("Qwen3MoeForCausalLM", **GROUPED, **MOE, head_dim=16, num_experts=4, mlp_only_layers=[0])


def deepseek_v3(**settings):
    layers = {**SIZES, "num_hidden_layers": 3}
    return made("DeepseekV3ForCausalLM", **{**layers, **MOE, **LATENT, "num_key_value_heads": 4, **settings})


def qwen2_5_vl(tied=False):
    text = {**GROUPED, "rope_parameters": ANGLES}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=VISION, tie_word_embeddings=tied)
    with torch.device("meta"):
        return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen2_5_vl_text():
    return qwen2_5_vl().model.language_model
